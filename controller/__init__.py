"""The controller: takes observations, evaluates policies, answers with armed tables and directives."""
