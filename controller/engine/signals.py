"""The signals a policy can name.  Read by the loader (names), the agent (layout) and the docs."""

SIGNALS: dict[str, str] = {
    "loss": "mean loss of the step over all ranks, before the update is applied",
    "grad_norm": "L2 norm of the gradient as the optimizer will use it",
    "update_norm": "L2 norm of the pending update (LR included, weight decay left out)",
    "exp_avg_norm": "L2 norm of Adam's first moment m as the pending step would leave it",
    "exp_avg_sq_norm": "L2 norm of Adam's second moment v as the pending step would leave it",
    "nonfinite_count": "gradient elements that are NaN or infinite",
    "lr": "learning rate of the first parameter group, trimtab's factor included",
}
"""Name to meaning, in the order of the wire layout."""

SCALED_BY_LR = frozenset({"lr", "update_norm"})
"""Signals proportional to the LR: their past says nothing once trimtab's own LR factor changes."""
