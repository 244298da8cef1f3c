"""What the training loop tells of a step, and the vector that the ranks add up.

One fixed layout on every rank: the probe's sums, what was told, counts of ranks, and in some steps
the sketch.  Everything in it is a sum, float64.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimtab.agent.probe.measure import Measured
from trimtab.agent.probe.sums import LAYER_SIGNALS, SUMS, signals_of
from trimtab.controller.engine.bins import BINS
from trimtab.controller.engine.signals import of_dataset

_NEVER_ABSENT = frozenset(
    {"grad_norm", "update_norm", "exp_avg_norm", "exp_avg_sq_norm", "nonfinite_count"}
)
"""Signals whose NaN means a NaN in the step, not that there is nothing to tell."""


class Told:
    """What `guard.observe` said since the last step, on this rank.  Never waits for a device."""

    def __init__(self, datasets: Sequence[str] = (), signals: Sequence[str] = ()) -> None:
        self.names = (
            "loss",
            "unclipped_grad_norm",
            "loss_scale",
            "step_time",
            "agent_overhead",
            "sketch_every_steps",
            *map(of_dataset, datasets),
            *signals,
        )
        """Signals whose mean over the ranks that told them counts, in order."""
        self.clear()

    def clear(self) -> None:
        """Forget everything: the step is done."""
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self._tokens: Tensor | float | None = None

    def add(self, name: str, value: Tensor | float) -> None:
        """Take a value of one of `names`; of several before a step, the mean counts."""
        value = value.detach() if isinstance(value, Tensor) else float(value)
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def add_tokens(self, tokens: Tensor | float) -> None:
        """Take a number of tokens; all of a step count together, over all ranks."""
        tokens = tokens.detach() if isinstance(tokens, Tensor) else tokens
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    @property
    def own_loss(self) -> Tensor | float | None:
        """Mean loss of this rank's batches; None: not told."""
        return self._sums["loss"] / self._counts["loss"] if "loss" in self._sums else None

    def vector(self, device: torch.device) -> Tensor:
        """Return (mean, 1) of each name or (0, 0), then tokens and whether there are any."""
        parts: list[Tensor | float] = []
        for name in self.names:
            if name in self._sums:
                parts += [self._sums[name] / self._counts[name], 1.0]
            else:
                parts += [0.0, 0.0]
        parts += [0.0, 0.0] if self._tokens is None else [self._tokens, 1.0]
        return torch.stack(
            [
                part.to(device, torch.float64).reshape(())
                if isinstance(part, Tensor)
                else torch.tensor(part, dtype=torch.float64, device=device)
                for part in parts
            ]
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """The job-wide numbers of a step."""

    values: Mapping[str, float]
    vectors: Mapping[str, tuple[float, ...]]
    ratio_sketch: tuple[int, ...]
    activations: Tensor | None
    """Sum and number of absolute activations, shape (groups, 2)."""
    with_gradients: bool
    failed: bool
    """Whether a rank could not measure: nothing else holds then."""
    scaler_skips: bool
    """Whether a GradScaler throws this step away by itself."""


class Layout:
    """Where everything is in the vector."""

    def __init__(
        self, groups: int, told: Sequence[str], signals: Sequence[str], *, sketches: bool
    ) -> None:
        """Lay out the vector.

        Args:
            groups: Number of layer groups.
            told: `Told.names`.
            signals: Signals of the probe that are reported.
            sketches: Whether there is a sketch in the steps that are sketched.
        """
        self._groups = groups
        self._sketch_size = groups * BINS if sketches else 0
        self._told = told
        self._signals = tuple(signals)
        self._rows = [LAYER_SIGNALS.index(name) for name in signals]

    def vector(self, measured: Measured, told: Tensor, *, scaler_skips: bool) -> Tensor:
        """Return this rank's part."""
        sums = measured.sums
        # A rank without gradients has no element that counts.
        own = sums[:, SUMS.index("elements")].sum() > 0
        flags = torch.stack([own.double(), torch.zeros_like(sums[0, 0])])
        flags[1] = float(scaler_skips)
        parts = [flags, told.to(sums.device), sums.reshape(-1)]
        parts += [p.reshape(-1) for p in (measured.sketch, measured.activations) if p is not None]
        return torch.cat([torch.zeros_like(flags[:1]), *parts])

    def failed(self, *, sketched: bool, activations: bool) -> Tensor:
        """Return the part of a rank that could not measure."""
        size = 3 + 2 * len(self._told) + 2 + self._groups * len(SUMS)
        size += self._sketch_size * sketched + 2 * self._groups * activations
        vector = torch.zeros(size, dtype=torch.float64)
        vector[0] = 1.0
        return vector

    def reading(self, total: Tensor, *, sketched: bool) -> Reading:
        """Return what the sum of all ranks' parts says."""
        told_at = 3
        sums_at = told_at + 2 * len(self._told) + 2
        sketch_at = sums_at + self._groups * len(SUMS)
        failed, with_gradients, scaler_skips, *told = total[:sums_at].tolist()
        sums = total[sums_at:sketch_at].view(self._groups, len(SUMS))
        values, vectors = self._of_layers(signals_of(sums)[self._rows].tolist())
        for name, mean, ranks in zip(self._told, told[:-2:2], told[1:-2:2], strict=True):
            # A NaN loss is a NaN in the step; in any other it is nothing to go by.
            if ranks and (name == "loss" or math.isfinite(mean)):
                values[name] = mean / ranks
        if told[-1]:
            values["tokens"] = told[-2]
        activations_at = sketch_at + self._sketch_size * sketched
        sketch = total[sketch_at:activations_at].round().clamp(min=0).long().tolist()
        activations = total[activations_at:].view(-1, 2)
        return Reading(
            values=values,
            vectors=vectors,
            ratio_sketch=tuple(sketch),
            activations=activations if len(activations) else None,
            with_gradients=bool(with_gradients),
            failed=bool(failed),
            scaler_skips=bool(scaler_skips),
        )

    def _of_layers(
        self, rows: list[list[float]]
    ) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
        values, vectors = {}, {}
        for name, (whole, *each) in zip(self._signals, rows, strict=True):
            if name in _NEVER_ABSENT or math.isfinite(whole):
                values[name] = whole
            vectors[name] = tuple(each)
        return values, vectors


def with_activations(reading: Reading, sums: Tensor, largest: Tensor) -> Reading:
    """Return the reading with activation_mean and activation_max where there were any."""
    means = sums[:, 0] / sums[:, 1]
    peaks = torch.where(sums[:, 1] > 0, largest, torch.nan)
    whole = sums.sum(0)
    values = {
        "activation_mean": float(whole[0] / whole[1]),
        "activation_max": float(largest.max()),
    }
    # An activation that is not finite has a loss that is not: nothing to go by beside it.
    known = {name: v for name, v in values.items() if math.isfinite(v) and whole[1] > 0}
    vectors = {"activation_mean": tuple(means.tolist()), "activation_max": tuple(peaks.tolist())}
    return replace(
        reading,
        values={**reading.values, **known},
        vectors={**reading.vectors, **vectors},
    )
