"""The accepted past of one signal and statistics over its last n values.  Used by the state."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable

MAX_WINDOW_STEPS = 4096
"""Longest window a rule may ask for: memory and replay time grow with it."""

REWIND_STEPS = 512
"""Values kept beyond the longest window, so that a rollback this short rewinds exactly."""

MAD_TO_SIGMA = 1.4826
"""The MAD of a normal distribution times this is its standard deviation."""

SPREAD_FLOOR = 0.002
"""Least spread, as a share of the median: a flat stretch must not make every wiggle an outlier."""


class Window:
    """The last `size` values, kept sorted; statistics are known once half of them are there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ordered: list[float] = []

    def push(self, value: float, leaving: float | None) -> None:
        """Take in a value and drop the one that falls out of the window."""
        if leaving is not None:
            del self.ordered[bisect_left(self.ordered, leaving)]
        insort(self.ordered, value)

    @property
    def known(self) -> bool:
        """Whether enough values are there to speak of a level."""
        return len(self.ordered) >= max(1, self.size // 2)

    def median(self) -> float:
        """Return the median; the mean of the two middle values for an even count."""
        return _middle(self.ordered)

    def mad(self) -> float:
        """Return the median absolute deviation from the median."""
        center = self.median()
        return _middle(sorted(abs(value - center) for value in self.ordered))

    def mean(self) -> float:
        """Return the arithmetic mean."""
        return math.fsum(self.ordered) / len(self.ordered)

    def std(self) -> float:
        """Return the population standard deviation."""
        center = self.mean()
        return math.sqrt(
            math.fsum((value - center) ** 2 for value in self.ordered) / len(self.ordered)
        )

    def min(self) -> float:
        """Return the least value."""
        return self.ordered[0]

    def max(self) -> float:
        """Return the greatest value."""
        return self.ordered[-1]

    def spread(self) -> float:
        """Return the robust sigma of zscore: 1.4826 MAD, at least 0.2 % of the median."""
        return max(MAD_TO_SIGMA * self.mad(), SPREAD_FLOOR * abs(self.median()))


STATISTICS: dict[str, Callable[[Window], float]] = {
    "median": Window.median,
    "mad": Window.mad,
    "mean": Window.mean,
    "std": Window.std,
    "min": Window.min,
    "max": Window.max,
    "spread": Window.spread,
}
"""Name in the policy language to the statistic."""


class Series:
    """Accepted values of one signal, newest last, with one sorted window per size asked for."""

    def __init__(self, sizes: frozenset[int]) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.windows = {size: Window(size) for size in sizes}
        self.keep = max(sizes, default=0) + REWIND_STEPS

    def push(self, step: int, value: float) -> None:
        """Take in the value of a step."""
        for size, window in self.windows.items():
            window.push(value, self.values[-size] if len(self.values) >= size else None)
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) > 2 * self.keep:  # seldom, so that a push stays O(log n)
            del self.steps[: -self.keep], self.values[: -self.keep]

    def refill(self, steps: list[int], values: list[float]) -> None:
        """Replace the whole past."""
        self.steps, self.values = list(steps), list(values)
        for size, window in self.windows.items():
            window.ordered = sorted(self.values[-size:])

    def rewind(self, step: int) -> None:
        """Forget the values of `step` and later ones."""
        kept = len(self.steps)
        while kept and self.steps[kept - 1] >= step:
            kept -= 1
        self.refill(self.steps[:kept], self.values[:kept])

    def statistic(self, name: str, size: int) -> float | None:
        """Return a statistic of the last `size` values, or None while it is not known."""
        window = self.windows[size]
        if not window.known:
            return None
        value = STATISTICS[name](window)
        # A spread of zero (a signal that is always 0) is no scale to measure a distance with.
        return None if name == "spread" and value == 0 else value


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
