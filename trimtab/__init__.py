"""trimtab watches a training run step by step and acts before a bad update is applied."""

__version__ = "0.1.0"
