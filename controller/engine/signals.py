"""The signals a policy can name.  Read by the grammar (names), the agent (layout) and the docs."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalInfo:
    """What a signal means and how a rule may use it."""

    meaning: str
    layered: bool = False
    """Whether there is one value per layer group beside the global one."""
    late: bool = False
    """Whether it is known only after the step: rules see its value of the step before."""
    scaled_by_lr: bool = False
    """Whether it is proportional to the LR: its past says nothing once the LR factor changes."""


SIGNALS: dict[str, SignalInfo] = {
    "loss": SignalInfo(
        meaning="mean loss of the step over all ranks, before the update is applied"
    ),
    "dataset_loss": SignalInfo(
        meaning="mean loss of the step on one dataset; written dataset_loss[name]"
    ),
    "grad_norm": SignalInfo(
        meaning="L2 norm of the gradient as the optimizer will use it, after clipping",
        layered=True,
    ),
    "unclipped_grad_norm": SignalInfo(meaning="L2 norm of the gradient before clipping"),
    "update_norm": SignalInfo(
        meaning="L2 norm of the pending update (LR included, weight decay left out)",
        layered=True,
        scaled_by_lr=True,
    ),
    "applied_update_norm": SignalInfo(
        meaning="L2 norm of the update as it was applied in the step before, weight decay included;"
        " of optimizers whose pending update cannot be worked out",
        layered=True,
        late=True,
        scaled_by_lr=True,
    ),
    "param_norm": SignalInfo(meaning="L2 norm of the parameters", layered=True),
    "update_ratio_norm": SignalInfo(
        meaning="update_norm over param_norm", layered=True, scaled_by_lr=True
    ),
    "exp_avg_norm": SignalInfo(
        meaning="L2 norm of Adam's first moment m as the pending step would leave it",
        layered=True,
    ),
    "exp_avg_sq_norm": SignalInfo(
        meaning="L2 norm of Adam's second moment v as the pending step would leave it",
        layered=True,
    ),
    "grad_momentum_cosine": SignalInfo(
        meaning="cosine of the angle between the gradient and Adam's first moment, -1 to 1",
        layered=True,
    ),
    "gradient_snr": SignalInfo(
        meaning="signal-to-noise ratio of the gradient: norm of m over the root of the sum of v",
        layered=True,
    ),
    "below_eps_fraction": SignalInfo(
        meaning="share of elements whose gradient or sqrt(v) is below Adam's eps, 0 to 1",
        layered=True,
    ),
    "ratio_dip": SignalInfo(
        meaning="dip statistic of the distribution of m/sqrt(v), 0 to 0.25; high: not unimodal",
        layered=True,
        late=True,
    ),
    "ratio_dip_pvalue": SignalInfo(
        meaning="p-value of ratio_dip against a unimodal distribution, 0 to 1",
        layered=True,
        late=True,
    ),
    "dead_fraction": SignalInfo(
        meaning="share of neurons whose gradient stayed zero, 0 to 1", layered=True, late=True
    ),
    "activation_mean": SignalInfo(
        meaning="mean absolute output of the layer group's module, where the job measures it",
        layered=True,
        late=True,
    ),
    "activation_max": SignalInfo(
        meaning="largest absolute output of the layer group's module, where the job measures it",
        layered=True,
        late=True,
    ),
    "nonfinite_count": SignalInfo(
        meaning="gradient elements that are NaN or infinite", layered=True
    ),
    "lr": SignalInfo(
        meaning="learning rate of the first parameter group, trimtab's factor included",
        scaled_by_lr=True,
    ),
    "loss_scale": SignalInfo(meaning="factor of the gradient scaler (fp16)"),
    "step_time": SignalInfo(meaning="wall time of the step in seconds", late=True),
    "tokens": SignalInfo(meaning="tokens in the step's batch over all ranks"),
    "agent_overhead": SignalInfo(
        meaning="share of the leader's wall time that the agent takes, mean of the steps before,"
        " 0 to 1",
        late=True,
    ),
    "sketch_every_steps": SignalInfo(
        meaning="steps between two measurements of what is costly: ratio_dip, param_norm,"
        " dead_fraction",
        late=True,
    ),
}
"""Name to what it is."""

DATASET_LOSS = "dataset_loss"

SCALED_BY_LR = frozenset(name for name, info in SIGNALS.items() if info.scaled_by_lr)
"""Signals proportional to the LR."""


def of_dataset(name: str) -> str:
    """Return the name of the loss signal of one dataset."""
    return f"{DATASET_LOSS}[{name}]"


@functools.cache
def datasets(measured: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the datasets among measured signals, in order."""
    prefix = f"{DATASET_LOSS}["
    return tuple(s.removeprefix(prefix)[:-1] for s in measured if s.startswith(prefix))


def with_datasets(
    values: Mapping[str, float],
    vectors: Mapping[str, tuple[float, ...]],
    measured: tuple[str, ...],
) -> Mapping[str, tuple[float, ...]]:
    """Return the vectors with the one over datasets; a dataset not in this step is NaN in it."""
    names = datasets(measured)
    if not names:
        return vectors
    losses = tuple(values.get(of_dataset(name), math.nan) for name in names)
    return {**vectors, DATASET_LOSS: losses}
