"""What the probe adds up per layer group, and the signals that follow from it.

Everything is a sum over elements, so that the sums of shards add up to those of the whole.
"""

import torch
from torch import Tensor

SUMS = (
    "grad_sq",
    "update_sq",
    "exp_avg_sq",
    "exp_avg_sq_sq",
    "exp_avg_sq_sum",
    "grad_past_exp_avg",
    "past_exp_avg_sq",
    "nonfinite",
    "below_eps",
    "elements",
    "param_sq",
    "applied_sq",
    "dead",
    "neurons",
)
"""Columns of a probe's sums.

`_sq` is a sum of squares; exp_avg (m) and exp_avg_sq (v) are as the pending step would leave them,
`past_exp_avg` is m as the step before left it."""

LAYER_SIGNALS = (
    "grad_norm",
    "update_norm",
    "applied_update_norm",
    "param_norm",
    "update_ratio_norm",
    "exp_avg_norm",
    "exp_avg_sq_norm",
    "grad_momentum_cosine",
    "gradient_snr",
    "below_eps_fraction",
    "dead_fraction",
    "nonfinite_count",
)
"""Rows of `signals_of`."""


def signals_of(sums: Tensor) -> Tensor:
    """Return the signals of the whole job and of each layer group, without leaving the device.

    Args:
        sums: Job-wide, float64, shape (groups, len(SUMS)).

    Returns:
        float64, shape (len(LAYER_SIGNALS), 1 + groups); first the whole job.  NaN where a value
        cannot be told: nothing was measured, or a denominator is 0.
    """
    rows = torch.cat([sums.sum(0, keepdim=True), sums]).T
    of = dict(zip(SUMS, rows, strict=True))
    roots = rows.sqrt()
    root = dict(zip(SUMS, roots, strict=True))
    nowhere = torch.full_like(rows[0], torch.nan)
    signals = {
        "grad_norm": root["grad_sq"],
        "update_norm": root["update_sq"],
        "applied_update_norm": root["applied_sq"],
        "param_norm": root["param_sq"],
        "update_ratio_norm": root["update_sq"] / root["param_sq"],
        "exp_avg_norm": root["exp_avg_sq"],
        "exp_avg_sq_norm": root["exp_avg_sq_sq"],
        "grad_momentum_cosine": of["grad_past_exp_avg"]
        / (root["grad_sq"] * root["past_exp_avg_sq"]),
        "gradient_snr": root["exp_avg_sq"] / root["exp_avg_sq_sum"],
        "below_eps_fraction": of["below_eps"] / of["elements"],
        "dead_fraction": of["dead"] / of["neurons"],
        # Replicas count for their share each: a third three times is not quite one.
        "nonfinite_count": of["nonfinite"].round(),
    }
    found = torch.stack([signals[name] for name in LAYER_SIGNALS])
    return torch.where(of["elements"] > 0, found, nowhere)
