"""A job without tensors: judges its steps by the engine's tables and does what directives say.

Used by the unit tests of policies; the job that they are written for does the same with tensors.
"""

from collections import Counter
from collections.abc import Mapping

from trimtab.controller.engine.model import (
    Ack,
    Action,
    ArmedTable,
    Change,
    Directive,
    Layout,
    Observation,
    Outcome,
    Record,
    Registered,
    Verdict,
    VerdictKind,
)
from trimtab.controller.engine.policy import Policy
from trimtab.controller.engine.signals import with_datasets
from trimtab.controller.engine.state import State
from trimtab.controller.engine.step import Outputs, step
from trimtab.controller.engine.verdict import judge


class SimulatedJob:
    """Feeds one engine state; `lag` is how many steps late its tables come."""

    def __init__(
        self, policy: Policy, layout: Layout, *, lag: int = 1, answering: bool = True
    ) -> None:
        self.layout = layout
        self.lag = lag
        self.answering = answering
        """Whether directives are carried out and acknowledged at once."""
        self.seq = 0
        self.step_number = 0
        self.lr_factor = 1.0
        self.records: list[Record] = []
        self.directives: list[Directive] = []
        self.verdicts: list[Verdict] = []
        self.state = State(policy)
        outputs = step(self.state, Registered(epoch=0, layout=layout))
        self.tables: list[ArmedTable | None] = [*([None] * (lag - 1)), outputs.table]
        self._ends: list[tuple[int, float]] = []

    def take_step(
        self,
        values: Mapping[str, float],
        vectors: Mapping[str, tuple[float, ...]],
        declared: tuple[Change, ...] = (),
    ) -> Verdict:
        """Judge a pending step with these signals and tell the engine."""
        table = self.tables[-self.lag]
        since = table.seq if table else self.seq
        stopped = ((s, v) for s, v in enumerate(self.verdicts) if v.kind is not VerdictKind.APPLY)
        verdict = judge(
            table,
            values,
            with_datasets(values, vectors, self.layout.signals),
            seq=self.seq,
            lr_factor=self.lr_factor,
            spent=Counter(v.rule for seq, v in stopped if seq > since),
            declared=declared,
        )
        self.verdicts.append(verdict)
        observation = Observation(
            seq=self.seq,
            step=self.step_number,
            values=values,
            vectors=vectors,
            verdict=verdict,
            lr_factor=self.lr_factor,
            declared=declared,
        )
        self.seq += 1
        self.step_number += 1
        self.take(step(self.state, observation))
        while self._ends and self._ends[0][0] <= self.seq:
            self.lr_factor /= self._ends.pop(0)[1]
        return verdict

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
            if over := int(directive.arguments["over"]):
                self._ends = sorted([*self._ends, (self.seq + over, directive.arguments["by"])])
        if outcome is Outcome.PENDING and directive.action is Action.ROLLBACK:
            self.step_number = max(0, int(directive.arguments["before_step"]))
        ack = Ack(
            id=directive.id,
            epoch=directive.epoch,
            seq=self.seq - 1,
            step=self.step_number,
            outcome=outcome,
        )
        self.take(step(self.state, ack))
