"""Watches the loss after an intervention until it is back in its band or the deadline passes."""

from dataclasses import dataclass, field

from trimtab.controller.engine.model import Intervention, Outcome
from trimtab.controller.engine.policy import OUTCOME_WINDOW_STEPS
from trimtab.controller.engine.series import Series

CALM_STEPS = 3
"""The median of this many losses in a row must be in the band: one low batch is no recovery."""

BAND_SPREADS = 3
"""The band ends this many spreads above the median of the loss before the intervention."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """One open intervention."""

    intervention: Intervention
    band: float | None
    """Highest loss that counts as recovered; None when no level was known."""
    deadline: int
    """Tick at which the outcome is due."""
    rung: int = 0
    """Where the rule's ladder stood."""
    losses: list[float] = field(default_factory=list)
    """The last losses of applied steps, newest last."""

    def saw(self, loss: float | None, tick: int) -> Outcome:
        """Take in the loss of an applied step (None: vetoed or absent); return how it stands."""
        if loss is not None:
            self.losses = [*self.losses[1 - CALM_STEPS :], loss]
            calm = len(self.losses) == CALM_STEPS
            if self.band is not None and calm and sorted(self.losses)[CALM_STEPS // 2] <= self.band:
                return Outcome.RECOVERED
        if tick < self.deadline:
            return Outcome.PENDING
        unknown = self.band is None or not self.losses
        return Outcome.UNKNOWN if unknown else Outcome.NOT_RECOVERED


def band(loss: Series) -> float | None:
    """Return the highest loss that still belongs to the accepted past, or None if unknown."""
    median = loss.statistic("median", OUTCOME_WINDOW_STEPS, 0.0)
    spread = loss.statistic("spread", OUTCOME_WINDOW_STEPS, 0.0)
    if median is None or spread is None:
        return None
    return median + BAND_SPREADS * spread
