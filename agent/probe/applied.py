"""The update as it was applied, for optimizers whose pending update has no adapter.

Known only after the step, so it can warn, but not stop that step.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

SAMPLED_ELEMENTS = 1 << 22
"""Elements of a rank that are compared.  Below it the norm is exact; above it, that of an evenly
spaced sample, off by about 1/sqrt(2 SAMPLED_ELEMENTS) = 0.03 % for elements of like size."""


class Applied:
    """Compares parameters before and after a step; keeps at most SAMPLED_ELEMENTS of them."""

    def __init__(self) -> None:
        self._before: list[tuple[int, Tensor, Tensor, float]] = []

    def before(self, parameters: Iterable[tuple[int, float, Tensor]]) -> None:
        """Remember parameters: (layer group, its share, local elements, flat)."""
        given = list(parameters)
        stride = 1 + sum(flat.numel() for _, _, flat in given) // SAMPLED_ELEMENTS
        self._before = []
        for row, share, flat in given:
            sample = flat[::stride]
            if sample.numel():
                factor = share * flat.numel() / sample.numel()
                self._before.append((row, sample, sample.clone(), factor))

    def after(self, groups: int) -> Tensor:
        """Return the sum of squares of what changed, per layer group, float64; forget the rest."""
        sums = torch.zeros(groups, dtype=torch.float64)
        for row, sample, was, factor in self._before:
            change = sample.double() - was.double()
            sums[row] += (change.square().sum() * factor).cpu()
        self._before = []
        return sums
