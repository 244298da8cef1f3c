"""The pure decision core; the agent shares its values and the evaluation of residuals."""
