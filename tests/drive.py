"""A simulated job with words for what the tests of the engine ask."""

import random

from trimtab.controller.engine.model import (
    Climbed,
    Decision,
    Intervention,
    Layout,
    Outcome,
    Verdict,
    VerdictKind,
)
from trimtab.controller.engine.signals import DATASET_LOSS, SIGNALS
from trimtab.controller.loader import parse_policy
from trimtab.controller.simulation import SimulatedJob

SCALARS = tuple(name for name in SIGNALS if name != DATASET_LOSS)
"""Every built-in signal that is one number."""

SKIP_LOUD_LOSS = """
version: 1
defaults: {after: 0, limit: 100 per 1000 steps}
rules:
  - name: loud-loss
    when: loss > 2 * median(loss, 16)
    do: skip_batch
"""


class Job(SimulatedJob):
    """A simulated job under a policy's text, with words for what tests ask."""

    def __init__(
        self,
        policy: str = SKIP_LOUD_LOSS,
        lag: int = 1,
        layout: Layout | None = None,
        *,
        answering: bool = True,
    ) -> None:
        super().__init__(
            parse_policy(policy, "test.yaml"),
            layout or Layout(signals=SCALARS),
            lag=lag,
            answering=answering,
        )

    def step(self, **values: float) -> Verdict:
        """Judge a pending step with these signals and tell the engine."""
        return self.take_step(values, {})

    def calm(self, steps: int, seed: int = 0, **around: float) -> None:
        """Take steps with values within 1 % of `around` (default: a loss of 2)."""
        noise = random.Random(seed)
        for _ in range(steps):
            pairs = (around or {"loss": 2.0}).items()
            self.step(**{name: value * noise.uniform(0.99, 1.01) for name, value in pairs})

    def cut_off(self) -> None:
        """From now on no newer table comes: the controller is gone."""
        self.tables = [self.tables[-self.lag]] * 1000
        self.lag = len(self.tables)

    def vetoes(self) -> list[int]:
        """Return the seqs of the vetoed steps."""
        return [at for at, v in enumerate(self.verdicts) if v.kind is VerdictKind.VETO]

    def decisions(self) -> list[Decision]:
        """Return the decisions so far."""
        return [record for record in self.records if isinstance(record, Decision)]

    def climbs(self) -> list[Climbed]:
        """Return the moves of ladders so far."""
        return [record for record in self.records if isinstance(record, Climbed)]

    def outcomes(self) -> dict[str, Outcome]:
        """Return the last known outcome of each intervention, by id."""
        return {r.id: r.outcome for r in self.records if isinstance(r, Intervention)}
