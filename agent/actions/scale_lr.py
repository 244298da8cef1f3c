"""`scale_lr`: a factor on the LR of every parameter group, in force only inside the step.

Between steps the LR is the scheduler's own, so no scheduler overwrites the factor and no
checkpoint carries it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from trimtab.controller.engine.model import LR_FACTOR_FLOOR


@dataclass(frozen=True, slots=True)
class _Factor:
    by: float
    until_step: int | None


class LrFactor:
    """The LR factors in force; they compose, and end by themselves."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._factors: list[_Factor] = []
        self._own: list[Any] = []

    def at(self, step: int) -> float:
        """Return the product of the factors that are in force in a step."""
        product = 1.0
        for factor in self._factors:
            if factor.until_step is None or step < factor.until_step:
                product *= factor.by
        return product

    def refusal(self, by: float, step: int) -> str:
        """Return why a further factor cannot be taken, or an empty text."""
        product = self.at(step) * by
        return (
            ""
            if product >= LR_FACTOR_FLOOR
            else f"the LR factor would be {product:g}, least is {LR_FACTOR_FLOOR}"
        )

    def add(self, by: float, step: int, over_steps: int) -> None:
        """Take a factor from `step` on, for `over_steps` steps (0: without an end)."""
        until = step + over_steps if over_steps else None
        self._factors = [f for f in self._factors if f.until_step is None or step < f.until_step]
        self._factors.append(_Factor(by, until))

    def apply(self, factor: float) -> None:
        """Scale the groups' LR for the step that is about to run."""
        if factor == 1.0:
            return
        self._own = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def undo(self) -> None:
        """Put the groups' own LR back; harmless when nothing was scaled."""
        for group, lr in zip(self._optimizer.param_groups, self._own, strict=False):
            group["lr"] = lr
        self._own = []
