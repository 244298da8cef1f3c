"""How often and how long a condition has held, step by step.  Used by the state."""

from collections.abc import Sequence
from typing import Any

from trimtab.controller.engine.expression import Counter, Tracked
from trimtab.controller.engine.series import REWIND_STEPS


class Held:
    """The past of one condition over all observed steps, flagged ones too."""

    def __init__(self, size: int) -> None:
        self._keep = size + REWIND_STEPS
        self._steps: list[int] = []
        self._totals: list[int] = []
        """How often it held up to and with each step that is kept."""
        self._origin = (0, 0, 0)
        """Total, streak and age before the first step that is kept."""
        self._streak = 0
        self._age = 0

    def push(self, step: int, *, held: bool) -> None:
        """Take in whether it held on a step."""
        self._steps.append(step)
        self._totals.append(self._total_at(-1) + held)
        self._streak = self._streak + 1 if held else 0
        self._age = 0 if held else self._age + 1
        if len(self._steps) > 2 * self._keep:
            kept = self._flags()[-self._keep :]
            gone, steps = self._flags()[: -self._keep], self._steps[-self._keep :]
            self._replay([], [])
            for flag in gone:
                self._count(held=flag)
            self._origin = (self._total_at(-1) + sum(gone), self._streak, self._age)
            self._replay(steps, kept)

    def _count(self, *, held: bool) -> None:
        self._streak = self._streak + 1 if held else 0
        self._age = 0 if held else self._age + 1

    def rewind(self, step: int) -> None:
        """Forget `step` and later ones."""
        kept = len(self._steps)
        while kept and self._steps[kept - 1] >= step:
            kept -= 1
        self._replay(self._steps[:kept], self._flags()[:kept])

    def value(self, tracked: Tracked) -> float:
        """Return a counter as it stood after the last step."""
        match tracked.counter:
            case Counter.STREAK:
                return float(self._streak)
            case Counter.AGE:
                return float(self._age)
        return float(self._total_at(-1) - self._total_at(-tracked.size))

    def _total_at(self, place: int) -> int:
        return self._totals[place] if len(self._totals) >= -place else self._origin[0]

    def _flags(self) -> list[bool]:
        before = [self._origin[0], *self._totals]
        return [now > then for then, now in zip(before, self._totals, strict=False)]

    def _replay(self, steps: list[int], flags: list[bool]) -> None:
        self._steps, self._totals = [], []
        _, self._streak, self._age = self._origin
        for step, held in zip(steps, flags, strict=True):
            self._steps.append(step)
            self._totals.append(self._total_at(-1) + held)
            self._count(held=held)

    def snapshot(self) -> list[Any]:
        """Return the past as JSON-able values."""
        return [self._steps, [int(flag) for flag in self._flags()], list(self._origin)]

    def restore(self, saved: Sequence[Any]) -> None:
        """Take the past that `snapshot` gave."""
        steps, flags, origin = saved
        self._origin = tuple(origin)
        self._replay(list(steps), [bool(flag) for flag in flags])
