"""Measures an optimizer's pending update, before it is applied, at nearly no cost."""
