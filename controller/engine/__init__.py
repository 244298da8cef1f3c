"""The pure decision core, shared by the controller (all of it) and the agent (values and residuals)."""
