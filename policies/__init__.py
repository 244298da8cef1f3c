"""Policies that ship with trimtab, as YAML."""
