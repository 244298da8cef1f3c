"""The controller: takes observations, evaluates policies, answers with tables and directives."""
