"""Tools for people who write policies: explain, test, describe, format, JSON Schema."""
