"""A job without tensors: judges its steps by the engine's tables and does what directives say."""

import random
from dataclasses import dataclass, field

from trimtab.controller.engine.model import (
    Ack,
    Action,
    ArmedTable,
    Decision,
    Directive,
    Intervention,
    Observation,
    Outcome,
    Record,
    Registered,
    Verdict,
    VerdictKind,
)
from trimtab.controller.engine.signals import SIGNALS
from trimtab.controller.engine.state import State
from trimtab.controller.engine.step import Outputs, step
from trimtab.controller.engine.verdict import judge
from trimtab.controller.loader import parse_policy

SKIP_LOUD_LOSS = """
version: 1
defaults: {after: 0, limit: 100 per 1000 steps}
rules:
  - name: loud-loss
    when: loss > 2 * median(loss, 16)
    do: skip_batch
"""


@dataclass
class Job:
    """Feeds one engine state; `lag` is how many steps late its tables come."""

    policy: str = SKIP_LOUD_LOSS
    lag: int = 1
    answering: bool = True
    """Whether directives are carried out and acknowledged at once."""
    seq: int = 0
    step_number: int = 0
    lr_factor: float = 1.0
    records: list[Record] = field(default_factory=list)
    directives: list[Directive] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = State(parse_policy(self.policy, "test.yaml"))
        outputs = step(self.state, Registered(epoch=0, signals=tuple(SIGNALS)))
        self.tables: list[ArmedTable | None] = [None] * (self.lag - 1) + [outputs.table]
        self.spent: dict[str, int] = {}

    def step(self, **values: float) -> Verdict:
        """Judge a pending step with these signals and tell the engine."""
        table = self.tables[-self.lag]
        verdict = judge(
            table, values, seq=self.seq, lr_factor=self.lr_factor, spent=self._spent_of(table)
        )
        if verdict.kind is VerdictKind.VETO:
            self.spent[verdict.rule] = self.spent.get(verdict.rule, 0) + 1
        self.verdicts.append(verdict)
        observation = Observation(
            seq=self.seq,
            step=self.step_number,
            values=values,
            verdict=verdict,
            lr_factor=self.lr_factor,
        )
        self.seq += 1
        self.step_number += 1
        self.take(step(self.state, observation))
        return verdict

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

    def take(self, outputs: Outputs) -> None:
        """Keep the records and the table, carry out the directives."""
        self.records += outputs.records
        self.directives += outputs.directives
        self.tables.append(outputs.table or self.tables[-1])
        for directive in outputs.directives if self.answering else ():
            self.answer(directive)

    def answer(self, directive: Directive, outcome: Outcome = Outcome.PENDING) -> None:
        """Carry a directive out, if that is the outcome, and acknowledge it."""
        if outcome is Outcome.PENDING and directive.action is Action.SCALE_LR:
            self.lr_factor *= directive.arguments["by"]
        if outcome is Outcome.PENDING and directive.action is Action.ROLLBACK:
            self.step_number = int(directive.arguments["before_step"])
        ack = Ack(
            id=directive.id,
            epoch=directive.epoch,
            seq=self.seq - 1,
            step=self.step_number,
            outcome=outcome,
        )
        self.take(step(self.state, ack))

    def vetoes(self) -> list[int]:
        """Return the seqs of the vetoed steps."""
        return [at for at, v in enumerate(self.verdicts) if v.kind is VerdictKind.VETO]

    def decisions(self) -> list[Decision]:
        """Return the decisions so far."""
        return [record for record in self.records if isinstance(record, Decision)]

    def outcomes(self) -> dict[str, Outcome]:
        """Return the last known outcome of each intervention, by id."""
        return {r.id: r.outcome for r in self.records if isinstance(r, Intervention)}

    def _spent_of(self, table: ArmedTable | None) -> dict[str, int]:
        name = (table.epoch, table.seq) if table else None
        if name != getattr(self, "_judged_by", None):
            self._judged_by, self.spent = name, {}
        return self.spent
