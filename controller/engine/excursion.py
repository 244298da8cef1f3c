"""Where a signal's accepted values lie, and a loss that left there.  Called by engine.episode."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from sys import float_info
from typing import Final

WINDOW: Final = 101
"""Accepted values a band is made of."""
MUTED: Final = 50
"""Values before a band judges: the loss of a young run falls too fast for one."""
QUIET_STEPS: Final = 20
"""Observed steps in the band that end an excursion; hits closer together are one."""
LEVEL_STEPS: Final = 25
"""Values whose median is called a level; one block of the slow baseline."""
BLOCKS: Final = 24
"""Blocks of the slow baseline: 600 accepted steps."""
LOSS_RATIO: Final = 1.05
LEAD_RATIO: Final = 1.5
"""Least rise over the median: hard batches on a healthy GPT-2 leave the grad norm below 1.4x."""
RISE_RATIO: Final = 0.02
"""Least lasting rise: Marin 32B's fatal spike was 3 % high."""

_SCALE_FALL = 4.0  # one overflow halves the loss scale and is routine
_SIGMAS = 6.0
_WARY_SIGMAS = 12.0  # where values reach zero no ratio means anything (policy gradients)
_REACHES = 2.0  # of the third value from either end: 4 sigma where noise is normal
_MAD_SIGMA = 1.4826
_FLOOR = 0.002  # of the median: a flat stretch must not make every wiggle an outlier
_WANDER = 4.0  # less than one sigma where noise is normal
_BASE_BLOCKS = 4
_NEAR_SIGMAS = 2.0
_SOFT_STEPS = 5
_REGAINED_SIGMAS = 0.75  # twice the noise of the two medians compared
_REGAINED_RATIO = 0.005  # Marin's loss settled 0.8 % above its level, and that was the end of it

Spot = tuple[int, int]
"""How many steps had been observed, and the job's number of the step."""
Seen = tuple[int, int, float]


def median(values: Iterable[float]) -> float:
    """The upper median of at least one value."""
    ranked = sorted(values)
    return ranked[len(ranked) // 2]


def middle(seen: Sequence[Seen]) -> float:
    """The upper median of what was seen."""
    return median(value for _, _, value in seen)


@dataclass(slots=True)
class Band:
    """A signal's last accepted values, judged by their median and MAD."""

    ratio: float
    order: list[float] = field(default_factory=list)
    ranked: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.ranked = sorted(self.order)

    def push(self, value: float) -> None:
        """Accept a finite value; the oldest of a full window goes."""
        if len(self.order) == WINDOW:
            del self.ranked[bisect_left(self.ranked, self.order.pop(0))]
        self.order.append(value)
        insort(self.ranked, value)

    def left(self, value: float) -> bool:
        """Whether a value is above the band and, of a positive median, by the ratio."""
        ranked = self.ranked
        if len(ranked) < MUTED or value <= ranked[len(ranked) // 2]:
            return False
        if value <= self.ratio * ranked[len(ranked) // 2]:
            return False
        return value > self.edge()

    def edge(self) -> float:
        """The upper end, beyond noise that reaches as far down or is often far up."""
        ranked, spread = self.ranked, self.spread()
        center = ranked[len(ranked) // 2]
        reach = max(center - ranked[2], ranked[-3] - center)
        sigmas = _SIGMAS if ranked[0] > 0 else _WARY_SIGMAS
        bound = center + max(sigmas * spread, _REACHES * reach)
        return min(bound, float_info.max) if spread > 0 else float_info.max

    def spread(self) -> float:
        """One standard deviation by the MAD, in O(log n): the half nearest the median is a run."""
        ranked, half = self.ranked, len(self.ranked) // 2
        center, first, last = ranked[half], 0, len(ranked) - half - 1
        while first < last:
            probe = (first + last) // 2
            if center - ranked[probe] > ranked[probe + half] - center:
                first = probe + 1
            else:
                last = probe
        mad = max(center - ranked[first], ranked[first + half] - center)
        if first:
            mad = min(mad, center - ranked[first - 1])
        return min(_MAD_SIGMA * max(mad, _FLOOR * abs(center)), float_info.max)


@dataclass(slots=True)
class Lead(Band):
    """A lead signal's band.  A signal that is never finite is told once and then ignored."""

    falls: bool = False
    """The sign is a fall (loss_scale)."""
    ignored: int = 0
    """Finite values to go before a value that is not counts again."""

    def left(self, value: float) -> bool:
        """Whether a value is outside, on the side that is a sign."""
        if not self.falls:
            return Band.left(self, value)
        ranked = self.ranked
        return len(ranked) >= MUTED and value * _SCALE_FALL <= ranked[len(ranked) // 2]

    def broken(self, value: float) -> bool:
        """Whether a value is not finite and that is news."""
        if isfinite(value):
            self.ignored = max(self.ignored - 1, 0)
        elif self.ignored:
            self.ignored = QUIET_STEPS
        else:
            return True
        return False

    def forget(self) -> None:
        """Take the band anew from the next values."""
        self.order, self.ranked = [], []


@dataclass(slots=True)
class Level(Band):
    """A loss's band, and under it the slow baseline that finds a rise no single step shows."""

    recent: list[Seen] = field(default_factory=list)
    blocks: list[Seen] = field(default_factory=list)
    """Level of each LEVEL_STEPS values, and where they began."""
    base: float = float_info.max
    """The third lowest block: low, and not by one lucky block."""
    wander: float = 0.0
    """How far a block lies from the next: more than noise where a loss has two modes (mixup)."""
    fresh: int = 0
    unsettled: bool = False
    """After a divergence the loss goes unjudged until it stops rising: one episode, not many."""

    def __post_init__(self) -> None:
        self.ranked = sorted(self.order)
        self.recent = [(index, step, value) for index, step, value in self.recent]
        self.blocks = [(index, step, value) for index, step, value in self.blocks]

    def left(self, value: float) -> bool:
        """Whether a value is above the band; no value is while the loss is unsettled."""
        return not self.unsettled and Band.left(self, value)

    def take(self, index: int, step: int, value: float) -> bool:
        """Accept a value; whether the loss has risen slowly by now."""
        self.push(value)
        self.recent.append((index, step, value))
        del self.recent[:-LEVEL_STEPS]
        self.fresh += 1
        if self.fresh >= LEVEL_STEPS:
            self._block()
        if self.unsettled or value <= self.base * (1 + RISE_RATIO):
            return False
        return self.risen()

    def _block(self) -> None:
        self.fresh = 0
        self.blocks.append((*self.recent[0][:2], self.level()))
        del self.blocks[:-BLOCKS]
        if len(self.blocks) >= _BASE_BLOCKS:
            blocks = [value for *_, value in self.blocks]
            self.base = sorted(blocks)[2]
            self.wander = median(abs(late - early) for early, late in pairwise(blocks))
        if self.unsettled and len(self.blocks) == BLOCKS:
            self.unsettled = self.risen()

    def level(self) -> float:
        """The level now; of the whole band where an episode has just ended."""
        return middle(self.recent) if self.recent else self.ranked[len(self.ranked) // 2]

    def sigma(self) -> float:
        """One standard deviation of the noise around a level."""
        return min(max(self.spread(), _WANDER * self.wander), float_info.max)

    def risen(self) -> bool:
        """Whether the level lies above the slow baseline; never where losses reach zero."""
        if len(self.recent) < LEVEL_STEPS or self.ranked[0] <= 0:
            return False
        rise = max(_NEAR_SIGMAS * self.sigma(), RISE_RATIO * self.base)
        return self.level() > self.base + rise

    def rose_at(self, after: int) -> Spot:
        """The best cut between values below and above a third of the rise, later than `after`."""
        line = self.base + (self.level() - self.base) / 3
        begin = self.recent[0][0]
        weighed = [(1, seen) for seen in reversed(self.recent)]
        weighed += [(LEVEL_STEPS, seen) for seen in reversed(self.blocks) if seen[0] < begin]
        best, total, where = 0.0, 0.0, self.recent[-1][:2]
        for weight, (index, step, value) in weighed:
            total += weight * (value - line)
            if total > best and index > after:
                best, where = total, (index, step)
        return where

    def regain(self) -> None:
        """Go on after an episode at the level there was; a slow rise needs new values."""
        self.recent, self.fresh = [], 0

    def restart(self, order: list[float], *, unsettled: bool) -> None:
        """Take the level anew from these values."""
        self.order, self.ranked = order, sorted(order)
        self.recent, self.blocks, self.fresh = [], [], 0
        self.base, self.wander, self.unsettled = float_info.max, 0.0, unsettled


@dataclass(slots=True)
class Trouble:
    """A loss out of its level, until it has been back for QUIET_STEPS."""

    level: float
    sigma: float
    line: float
    """Above it a single value is outside."""
    end: Spot
    """The last value outside."""
    peak: float | None = None
    peak_step: int = 0
    outs: int = 0
    quiet: int = 0
    """Values since the last one outside."""
    ring: list[Seen] = field(default_factory=list)
    block: list[float] = field(default_factory=list)
    low: float | None = None
    """The lowest level since the peak."""

    def __post_init__(self) -> None:
        self.end = (self.end[0], self.end[1])
        self.ring = [(index, step, value) for index, step, value in self.ring]

    def saw(self, index: int, step: int, value: float) -> None:
        """Take in the next finite value."""
        self.ring.append((index, step, value))
        del self.ring[:-QUIET_STEPS]
        self._track(step, value)
        if self._outside(value):
            self.outs, self.quiet, self.end = self.outs + 1, 0, (index, step)
            return
        self.quiet += 1
        if self.quiet >= QUIET_STEPS and not self.regained():
            self.outs, self.end = self.outs + 1, self.ring[QUIET_STEPS // 2][:2]

    def blind(self) -> None:
        """Take in a value that is not finite."""
        self.ring, self.quiet = [], 0

    def _track(self, step: int, value: float) -> None:
        if self.peak is None or value > self.peak:
            self.peak, self.peak_step, self.low, self.block = value, step, None, []
            return
        self.block.append(value)
        if len(self.block) == LEVEL_STEPS:
            level = median(self.block)
            self.low, self.block = level if self.low is None else min(self.low, level), []

    def _outside(self, value: float) -> bool:
        if value > self.line:
            return True
        soft = self.level + _NEAR_SIGMAS * self.sigma
        if value <= soft or len(self.ring) < _SOFT_STEPS:
            return False
        return middle(self.ring[-_SOFT_STEPS:]) > soft

    def regained(self) -> bool:
        """Whether the loss has been back at its level for QUIET_STEPS."""
        near = max(_REGAINED_SIGMAS * self.sigma, _REGAINED_RATIO * abs(self.level))
        return self.quiet >= QUIET_STEPS and middle(self.ring) <= self.level + near

    def back(self) -> bool:
        """Whether the level is regained as far as is known."""
        if self.quiet >= QUIET_STEPS or not self.quiet:
            return self.regained()
        return middle(self.ring[-self.quiet :]) <= self.level + _NEAR_SIGMAS * self.sigma

    def settled(self) -> bool:
        """Whether the loss came at least half of the way down, and does not rise again."""
        above = middle(self.ring) - self.level if self.ring else inf
        if self.peak is None or above > (self.peak - self.level) / 2:
            return False
        rising = self.low is not None and above > (
            1.5 * (self.low - self.level) + _NEAR_SIGMAS * self.sigma
        )
        return not rising
