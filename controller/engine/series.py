"""The accepted past of one signal and statistics over its last n values.  Used by the state.

Every statistic costs O(log n) a step and depends on the values of its window alone: sums are kept
as exact integers, so nothing drifts, and a window that is filled again gives the same bits.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_WINDOW_STEPS = 4096
"""Longest window a rule may ask for: memory and replay time grow with it."""

REWIND_STEPS = 512
"""Values kept beyond the longest window, so that a rollback this short rewinds exactly."""

MAD_TO_SIGMA = 1.4826
"""The MAD of a normal distribution times this is its standard deviation."""

SPREAD_FLOOR = 0.002
"""Least spread, as a share of the median: a flat stretch must not make every wiggle an outlier.

Of logarithms it is the least spread itself."""

BASELINE_GAP = 10
"""A baseline leaves out the newest 1/10 of its window, so that a rise under way is not in it."""

_FRACTION_BITS = 1074
"""Every float64 is a whole multiple of 2**-1074."""


class SortedWindow:
    """The last `size` values, the newest `gap` of the series left out, in order of size."""

    def __init__(self) -> None:
        self.ordered: list[float] = []

    def enter(self, value: float) -> None:
        """Take in the newest value."""
        insort(self.ordered, value)

    def leave(self, value: float) -> None:
        """Let the oldest value go."""
        del self.ordered[bisect_left(self.ordered, value)]

    def median(self) -> float:
        """Return the median; the mean of the two middle values for an even count."""
        ordered = self.ordered
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else _halfway(ordered[half - 1], ordered[half])

    def mad(self) -> float:
        """Return the median absolute deviation from the median."""
        center, half = self.median(), len(self.ordered) // 2
        upper = self._deviation(center, half + 1)
        if len(self.ordered) % 2:
            return upper
        return _halfway(self._deviation(center, half), upper)

    def _deviation(self, center: float, rank: int) -> float:
        """Return the `rank`-th smallest distance from the centre.

        The `rank` nearest values stand side by side in the sorted window: a search for where.
        """
        ordered = self.ordered
        low, high = 0, len(ordered) - rank
        while low < high:
            middle = (low + high) // 2
            if center - ordered[middle] > ordered[middle + rank] - center:
                low = middle + 1
            else:
                high = middle
        return max(center - ordered[low], ordered[low + rank - 1] - center)

    def quantile(self, q: float) -> float:
        """Return the q-quantile, interpolated between neighbours (numpy's default)."""
        place = q * (len(self.ordered) - 1)
        low = math.floor(place)
        below, above = self.ordered[low], self.ordered[min(low + 1, len(self.ordered) - 1)]
        return below + (above - below) * (place - low)

    def spread(self) -> float | None:
        """Return the robust sigma: 1.4826 MAD, at least 0.2 % of the median; None if 0."""
        return max(MAD_TO_SIGMA * self.mad(), SPREAD_FLOOR * abs(self.median())) or None


class SummedWindow:
    """Sums over the same values, without rounding; integers in units of 2**-1074."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.squares = 0
        self.ramp = 0
        """Sum of position (0 is the oldest) times value."""

    def enter(self, value: float) -> None:
        """Take in the newest value."""
        whole = _whole(value)
        self.ramp += self.count * whole
        self.count += 1
        self.total += whole
        self.squares += whole * whole

    def leave(self, value: float) -> None:
        """Let the oldest value go; every other one moves down by a position."""
        whole = _whole(value)
        self.count -= 1
        self.total -= whole
        self.squares -= whole * whole
        self.ramp -= self.total

    def mean(self) -> float:
        """Return the arithmetic mean, rounded once."""
        return self.total / (self.count << _FRACTION_BITS)

    def std(self) -> float:
        """Return the population standard deviation."""
        variance = self.count * self.squares - self.total * self.total
        return math.isqrt(variance) / (self.count << _FRACTION_BITS)

    def sigma(self) -> float | None:
        """Return the standard deviation, None if 0: it is no scale to measure a distance with."""
        return self.std() or None

    def slope(self) -> float | None:
        """Return the least-squares slope in units per accepted step; None for a single value."""
        n = self.count
        if n == 1:
            return None
        positions = n * (n - 1) // 2
        spread = n * (n * (n - 1) * (2 * n - 1) // 6) - positions * positions
        rise = n * self.ramp - positions * self.total
        try:
            return rise / (spread << _FRACTION_BITS)
        except OverflowError:  # from -1e308 to 1e308 in one step
            return math.copysign(math.inf, rise)


def _whole(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_FRACTION_BITS + 1 - denominator.bit_length())


SORTED: dict[str, Callable[[SortedWindow, float], float | None]] = {
    "median": lambda w, _: w.median(),
    "mad": lambda w, _: w.mad(),
    "min": lambda w, _: w.ordered[0],
    "max": lambda w, _: w.ordered[-1],
    "quantile": lambda w, q: w.quantile(q),
    "spread": lambda w, _: w.spread(),
    "log_spread": lambda w, _: max(MAD_TO_SIGMA * w.mad(), SPREAD_FLOOR),
    "baseline": lambda w, _: w.median(),
}
"""Statistics of a sorted window by name."""

SUMMED: dict[str, Callable[[SummedWindow], float | None]] = {
    "mean": SummedWindow.mean,
    "std": SummedWindow.std,
    "sigma": SummedWindow.sigma,
    "slope": SummedWindow.slope,
}
"""Statistics of a summed window by name."""

WindowKey = tuple[str, int, int]
"""("sorted" or "summed", size, gap)."""


def window_of(statistic: str, size: int) -> WindowKey:
    """Return the window that a statistic looks at."""
    if statistic in SUMMED:
        return ("summed", size, 0)
    return ("sorted", size, max(1, size // BASELINE_GAP) if statistic == "baseline" else 0)


class Window:
    """A sorted or summed window that moves along a series."""

    def __init__(self, key: WindowKey) -> None:
        kind, self.size, self.gap = key
        self._kind = SummedWindow if kind == "summed" else SortedWindow
        self._content: Any = self._kind()
        self._count = 0
        self._known: dict[tuple[str, float], float | None] = {}
        """Statistics worked out since the last push."""

    def push(self, values: list[float]) -> None:
        """Move on by one value: `values` is the whole series with the new one at its end."""
        at = len(values) - 1 - self.gap
        if at < 0:
            return
        if at >= self.size:
            self._content.leave(values[at - self.size])
        else:
            self._count += 1
        self._content.enter(values[at])
        self._known.clear()

    def refill(self, values: list[float]) -> None:
        """Start anew from a whole series."""
        end = max(0, len(values) - self.gap)
        window = values[max(0, end - self.size) : end]
        self._content, self._count = self._kind(), len(window)
        for value in window:
            self._content.enter(value)
        self._known.clear()

    def statistic(self, name: str, at: float) -> float | None:
        """Return a statistic, or None while fewer than half of the values are there."""
        key = (name, at)
        if key not in self._known:
            value = None
            if self._count >= (self.size + 1) // 2:
                content = self._content
                value = SUMMED[name](content) if name in SUMMED else SORTED[name](content, at)
            self._known[key] = value
        return self._known[key]


DECAYING = frozenset({"ewma", "ewstd", "ewsigma"})
"""Statistics whose second argument is a decay per step, not a number of steps."""


@dataclass(slots=True)
class Decaying:
    """Mean and variance with weights decay**age, normalised (West's incremental form)."""

    decay: float
    count: int = 0
    weight: float = 0.0
    mean: float = 0.0
    square: float = 0.0

    def enter(self, value: float) -> None:
        """Take in the newest value."""
        self.count += 1
        self.weight = self.decay * self.weight + 1.0
        delta = value - self.mean
        self.mean += delta / self.weight
        self.square = self.decay * self.square + delta * (value - self.mean)

    def statistic(self, name: str) -> float | None:
        """Return a statistic, or None until half of the weight of an endless past is there."""
        if self.weight * (1.0 - self.decay) < 0.5:
            return None
        if name == "ewma":
            return self.mean
        std = math.sqrt(max(0.0, self.square) / self.weight)
        return std if name == "ewstd" else std or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the rules of a policy want to know of one signal."""

    windows: frozenset[WindowKey] = frozenset()
    decays: frozenset[float] = frozenset()
    lag: int = 0
    log: bool = False
    """Whether it is the logarithm of the signal; values that are not positive stay out."""


@dataclass(slots=True)
class Flagged:
    """The current run of values that were kept out."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class Series:
    """Accepted values of one signal, newest last, with what the rules need of them."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.steps: list[int] = []
        self.values: list[float] = []
        self.flagged = Flagged()
        self.windows = {key: Window(key) for key in sorted(needs.windows)}
        self.decaying = {decay: Decaying(decay) for decay in sorted(needs.decays)}
        self.origin = {decay: Decaying(decay) for decay in self.decaying}
        """Of each decaying statistic: how it stood before the first value that is kept."""
        longest = max((size + gap for _, size, gap in needs.windows), default=0)
        self.keep = max(longest, needs.lag) + REWIND_STEPS

    def offer(self, step: int, value: float, *, flagged: bool, rebaseline: int) -> bool:
        """Let a value in, or keep it out if it is flagged or not finite.

        After `rebaseline` values in a row were kept out, those that are finite become the whole
        past: a new level.  Returns whether that happened.
        """
        if self.needs.log:
            value = math.log(value) if 0 < value < math.inf else math.nan
        if not flagged and math.isfinite(value):
            self.flagged = Flagged()
            self._push(step, value)
            return False
        self.flagged.steps.append(step)
        self.flagged.values.append(value)
        if len(self.flagged.steps) < rebaseline:
            return False
        level = [
            (at, kept)
            for at, kept in zip(self.flagged.steps, self.flagged.values, strict=True)
            if math.isfinite(kept)
        ]
        self.flagged = Flagged()
        if level:  # nothing but NaN is no level
            self.refill([at for at, _ in level], [kept for _, kept in level])
        return bool(level)

    def _push(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)
        for window in self.windows.values():
            window.push(self.values)
        for decaying in self.decaying.values():
            decaying.enter(value)
        if len(self.values) > 2 * self.keep:  # seldom, so that a push stays O(log n)
            gone = self.values[: -self.keep]
            for origin in self.origin.values():
                for old in gone:
                    origin.enter(old)
            del self.steps[: -self.keep], self.values[: -self.keep]

    def refill(self, steps: Iterable[int], values: Iterable[float]) -> None:
        """Replace the whole past."""
        self.origin = {decay: Decaying(decay) for decay in self.decaying}
        self._restart(list(steps), list(values))

    def _restart(self, steps: list[int], values: list[float]) -> None:
        self.steps, self.values = steps, values
        for window in self.windows.values():
            window.refill(values)
        for decay, origin in self.origin.items():
            decaying = Decaying(decay, origin.count, origin.weight, origin.mean, origin.square)
            for value in values:
                decaying.enter(value)
            self.decaying[decay] = decaying

    def rewind(self, step: int) -> None:
        """Forget the values of `step` and later ones, and what was kept out of late."""
        kept = len(self.steps)
        while kept and self.steps[kept - 1] >= step:
            kept -= 1
        self.flagged = Flagged()
        self._restart(self.steps[:kept], self.values[:kept])

    def forget(self) -> None:
        """Start anew, without a past."""
        self.flagged = Flagged()
        self.refill([], [])

    def statistic(self, name: str, size: float, at: float) -> float | None:
        """Return a statistic of the past, or None while it is not known."""
        if name in DECAYING:
            return self.decaying[size].statistic(name)
        if name == "lag":
            return self.values[-int(size)] if len(self.values) >= size else None
        return self.windows[window_of(name, int(size))].statistic(name, at)

    def snapshot(self) -> list[Any]:
        """Return the past as JSON-able values."""
        origins = [[o.decay, o.count, o.weight, o.mean, o.square] for o in self.origin.values()]
        flagged = [self.flagged.steps, [repr(value) for value in self.flagged.values]]
        return [self.steps, self.values, flagged, origins]

    def restore(self, saved: Sequence[Any]) -> None:
        """Take the past that `snapshot` gave; statistics it does not hold start with it."""
        steps, values, (flagged_steps, flagged_values), origins = saved
        self.flagged = Flagged(list(flagged_steps), [float(text) for text in flagged_values])
        for decay, *rest in origins:
            if decay in self.origin:
                self.origin[decay] = Decaying(decay, *rest)
        self._restart(list(steps), list(values))


def _halfway(low: float, high: float) -> float:
    return low / 2 + high / 2 if abs(low) > 1e300 or abs(high) > 1e300 else (low + high) / 2
