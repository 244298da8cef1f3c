"""What the agent costs, as a share of a step.  Used by the guard, on the leader."""

import time
from types import TracebackType

SMOOTHING = 0.05
"""Weight of the newest step in the means."""

SETTLED_STEPS = 50
"""Steps before the first judgement, and between two: the first ones compile and allocate."""

WORTHWHILE = 0.25
"""Share of the budget that the sketched steps must cost beyond the others, before making them
rarer is any use."""


class Mean:
    """An exponential mean of seconds that starts at its first value."""

    def __init__(self) -> None:
        self.s = 0.0

    def add(self, s: float) -> None:
        """Take a value."""
        self.s += (SMOOTHING if self.s else 1.0) * (s - self.s)


class Clock:
    """Measures steps, and as a context manager the parts of them that are ours.

    Waiting for other ranks is not ours.
    """

    def __init__(self, budget: float) -> None:
        """Take the share of a step that the agent may cost."""
        self.step_s: float | None = None
        """Wall time of the last step; None before the second one."""
        self._budget = budget
        self._done_at: float | None = None
        self._entered_at = self._own_s = 0.0
        self._steps, self._plain, self._sketched = Mean(), Mean(), Mean()
        self._every, self._since_judged = 1, 0

    def __enter__(self) -> None:
        self._entered_at = time.perf_counter()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._own_s += time.perf_counter() - self._entered_at

    def step_done(self, *, sketched: bool, every: int) -> None:
        """Take note that a step is over, whether it was sketched, and how often one is."""
        now = time.perf_counter()
        if self._done_at is not None:
            self.step_s = now - self._done_at
            self._steps.add(self.step_s)
            (self._sketched if sketched else self._plain).add(self._own_s)
        self._done_at, self._own_s, self._every = now, 0.0, every
        self._since_judged += 1

    @property
    def overhead(self) -> float:
        """Share of the steps' time that the agent takes, 0 to 1."""
        return self._share(self._plain.s) + self._extra

    def over_budget(self) -> bool:
        """Return whether sketching more rarely is called for; at most once in SETTLED_STEPS."""
        if self._since_judged < SETTLED_STEPS:
            return False
        self._since_judged = 0
        return self.overhead > self._budget and self._extra > WORTHWHILE * self._budget

    @property
    def _extra(self) -> float:
        return self._share(max(0.0, self._sketched.s - self._plain.s)) / self._every

    def _share(self, s: float) -> float:
        return s / self._steps.s if self._steps.s else 0.0
