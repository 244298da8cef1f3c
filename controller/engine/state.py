"""Everything the engine remembers of one run.  Moved only by engine.step; saved by snapshot.py."""

import math
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from trimtab.controller.engine.counter import Held
from trimtab.controller.engine.episode import Grader
from trimtab.controller.engine.expression import Node, Past, Seen, Signal, Tracked, Value, Vector
from trimtab.controller.engine.model import (
    Armed,
    ArmedTable,
    Change,
    Directive,
    Layout,
    Observation,
)
from trimtab.controller.engine.outcome import Watch
from trimtab.controller.engine.policy import Limit, Policy, Rule
from trimtab.controller.engine.program import Program, SeriesKey, missing
from trimtab.controller.engine.rule import RuleMemory
from trimtab.controller.engine.series import Series
from trimtab.controller.engine.signals import (
    DATASET_LOSS,
    SCALED_BY_LR,
    datasets,
    with_datasets,
)

LATE_HOLD_STEPS = 100
"""How long the last value of a late signal speaks for the present; longer ago, it is absent."""


@dataclass(slots=True)
class State:
    """One run's state.

    It is moved in place, since copying every window on every step would cost more than judging it;
    `snapshot` and `restore` give an independent copy.
    """

    policy: Policy
    layout: Layout = field(default_factory=lambda: Layout(signals=()))
    """What the job measures."""
    inactive: dict[str, frozenset[str]] = field(default_factory=dict)
    """Rules that need a signal which is not measured, with what they miss."""
    epoch: int = -1
    seq: int = -1
    """Of the last observation of this epoch."""
    step: int = -1
    tick: int = -1
    """Counts observed steps over all epochs."""
    lr_factor: float = 1.0
    """Of the last observation."""
    values: dict[str, float] = field(default_factory=dict)
    """Of the last observation."""
    late: dict[tuple[str, bool], tuple[int, Value]] = field(default_factory=dict)
    """(late signal, whether per layer group) to the tick and the value of its last measurement."""
    series: dict[SeriesKey, list[Series]] = field(default_factory=dict)
    """One a signal; of vectors, one a layer group or dataset."""
    held: dict[Node, Held] = field(default_factory=dict)
    """Condition of a counter to its past."""
    rules: dict[str, RuleMemory] = field(default_factory=dict)
    changed: dict[Change, int] = field(default_factory=dict)
    """Change to the tick at which it last came."""
    acted: list[tuple[int, str]] = field(default_factory=list)
    """(tick, cause) of acting decisions that still count for the limits of run and causes."""
    vetoes_in_row: int = 0
    nonfinite_in_row: int = 0
    watches: list[Watch] = field(default_factory=list)
    grader: Grader = field(default_factory=Grader)
    outstanding: dict[str, Directive] = field(default_factory=dict)
    """Directives without an ack, by id."""
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """("decision", rule, action, mode), ("intervention", rule, action), ("outcome", rule, action,
    outcome), ("episode", kind), ("climb", rule), ("over_budget", rule), ("verdict_mismatch",),
    ("rebaseline",): totals of the run."""
    program: Program = field(init=False)
    terms: tuple[Value | None, ...] = ()
    table: ArmedTable = field(init=False)
    revised: bool = False
    """Whether `table` was made anew by an ack since the last observation."""

    def __post_init__(self) -> None:
        """Make the series and memories that the policy needs."""
        self.program = Program(self.policy)
        self.rules = {rule.name: RuleMemory() for rule in self.policy.rules}
        self.held = {node: Held(n) for node, n in self.program.track_sizes.items()}
        self.expect(self.layout)
        self.rearm()

    def expect(self, layout: Layout) -> None:
        """Take in what the job measures: rules that need something else are inactive.

        The past of layer groups or datasets that are no longer the same is forgotten.
        """
        same_layers = layout.layer_groups == self.layout.layer_groups
        same_datasets = datasets(layout.signals) == datasets(self.layout.signals)
        self.layout = layout
        absent = {rule.name: missing(rule, layout) for rule in self.policy.rules}
        self.inactive = {name: signals for name, signals in absent.items() if signals}
        old, self.series = self.series, {}
        for key, needs in self.program.needs.items():
            name, each, _ = key
            same, size = True, 1
            if each and name == DATASET_LOSS:
                same, size = same_datasets, len(datasets(layout.signals))
            elif each:
                same, size = same_layers, len(layout.layer_groups)
            if key in old and same:
                self.series[key] = old[key]
            else:
                self.series[key] = [Series(needs) for _ in range(size)]

    def statistic(self, past: Past) -> Value | None:
        """Return a statistic of the accepted past; None (in a vector NaN) while unknown."""
        name, size, at = past.statistic, past.size, past.at
        found = self.series[past.signal.name, past.signal.each, past.log]
        if not past.signal.each:
            return found[0].statistic(name, size, at)
        values = [series.statistic(name, size, at) for series in found]
        return tuple([math.nan if value is None else value for value in values])

    def tracked(self, counter: Tracked) -> float:
        """Return a counter over the past of a condition."""
        return self.held[counter.condition].value(counter)

    def among(self, patterns: tuple[str, ...]) -> Vector:
        """Return 1 for each layer group that matches a pattern, else 0."""
        return tuple(
            float(any(fnmatchcase(group, pattern) for pattern in patterns))
            for group in self.layout.layer_groups
        )

    def last(self, signal: Signal) -> Value | None:
        """Return the last known value of a late signal."""
        tick, value = self.late.get((signal.name, signal.each), (-1 - LATE_HOLD_STEPS, None))
        return value if self.tick - tick < LATE_HOLD_STEPS else None

    def seen(self, observation: Observation) -> Seen:
        """Return what predicates are evaluated on: the observation, and the terms of the past."""
        vectors = observation.vectors
        groups = len(self.layout.layer_groups)
        if any(len(vector) != groups for vector in vectors.values()):  # of another layout
            vectors = {}
        vectors = with_datasets(observation.values, vectors, self.layout.signals)
        return Seen(values=observation.values, vectors=vectors, terms=self.terms)

    def known(self, uses: frozenset[int]) -> bool:
        """Return whether all these terms are known."""
        terms = self.terms
        return all(terms[index] is not None for index in uses)

    def holding_off(self, rule: Rule, tick: int) -> bool:
        """Return whether a change keeps the rule from matching at this tick."""
        return any(
            change in self.changed and tick < self.changed[change] + steps
            for change, steps in rule.hold_off.items()
        )

    def left(self, limit: Limit, cause: str | None = None) -> int:
        """Return what is left of the run's limit, or of a cause's."""
        since = self.tick - limit.window_steps
        spent = sum(tick > since and cause in (None, its) for tick, its in self.acted)
        return max(0, limit.count - spent)

    def fold(self) -> None:
        """Work out every term from the past as it is now."""
        self.terms = tuple([term(self) for term in self.program.terms])

    def rearm(self) -> None:
        """Fold the past and make the table for the next pending step."""
        self.fold()
        self.table = _table(self)

    def rewind(self, step: int) -> None:
        """Forget the past of `step` and later, as if the run had never been there."""
        for found in self.series.values():
            for series in found:
                series.rewind(step)
        for held in self.held.values():
            held.rewind(step)
        self.vetoes_in_row = 0
        for memory in self.rules.values():
            memory.streak = 0

    def forget(self, *, scaled_only: bool) -> None:
        """Let the past of all signals, or of those proportional to the LR, start anew."""
        for (name, _, _), found in self.series.items():
            if not scaled_only or name in SCALED_BY_LR:
                for series in found:
                    series.forget()

    def remember_late(self, seen: Seen) -> None:
        """Keep the values of late signals: they speak for the next steps."""
        for name, each in self.program.late:
            found = seen.vectors if each else seen.values
            if name in found:
                self.late[name, each] = (self.tick, found[name])

    def rule(self, name: str) -> Rule | None:
        """Return the policy's rule of that name."""
        return next((rule for rule in self.policy.rules if rule.name == name), None)


def _table(state: State) -> ArmedTable:
    """Return the table for the next pending step."""
    armed = []
    for rule in state.policy.rules:
        memory = state.rules[rule.name]
        residual = state.program.residual_of.get((rule.name, memory.rung))
        if residual is None or not _may_match(state, rule):
            continue
        if memory.could_fire(rule, state.tick + 1):
            budget = memory.budget(rule) if rule.cooldown_steps == 0 else 1
            armed.append(Armed(residual=residual, budget=budget))
    policy = state.policy
    return ArmedTable(
        epoch=state.epoch,
        seq=state.seq,
        expires_seq=state.seq + policy.expires_steps,
        lr_factor=state.lr_factor,
        policy_version=policy.version,
        residuals=state.program.residuals,
        terms=state.terms,
        armed=tuple(armed),
        budget=min(
            max(0, policy.rebaseline_steps - state.vetoes_in_row), state.left(policy.run_limit)
        ),
        cause_budgets={
            cause: state.left(limit, cause) for cause, limit in policy.cause_limits.items()
        },
    )


def _may_match(state: State, rule: Rule) -> bool:
    """Return whether a rule may match the next pending step."""
    return (
        rule.name not in state.inactive
        and state.step + 1 >= rule.after_steps
        and not state.holding_off(rule, state.tick + 1)
        and state.known(state.program.uses[rule.name])
    )
