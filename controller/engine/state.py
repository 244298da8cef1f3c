"""Everything the engine remembers of one run, and its form on disk.  Moved only by engine.step."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.controller.engine.expression import Node, fold
from trimtab.controller.engine.model import (
    Action,
    ArmedRule,
    ArmedTable,
    Directive,
    Intervention,
    Outcome,
)
from trimtab.controller.engine.outcome import Watch
from trimtab.controller.engine.policy import Policy, Rule
from trimtab.controller.engine.rule import RuleMemory
from trimtab.controller.engine.series import Series

SNAPSHOT_VERSION = 1


@dataclass(slots=True)
class State:
    """One run's state.

    It is moved in place, since copying every window on every step would cost more than judging it;
    `snapshot` and `restore` give an independent copy.
    """

    policy: Policy
    measured: tuple[str, ...] = ()
    """Signals the job measures, in the order of the wire layout."""
    inactive: frozenset[str] = frozenset()
    """Rules that need a signal which is not measured."""
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
    flagged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step, values) of the current run of flagged steps, kept out of the past."""
    series: dict[str, Series] = field(default_factory=dict)
    rules: dict[str, RuleMemory] = field(default_factory=dict)
    watches: list[Watch] = field(default_factory=list)
    outstanding: dict[str, Directive] = field(default_factory=dict)
    """Directives without an ack, by id."""
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """("decision", rule, action, mode), ("intervention", rule, action), ("outcome", rule, action,
    outcome), ("verdict_mismatch",), ("rebaseline",): totals of the run."""
    residuals: dict[str, Node | None] = field(default_factory=dict)
    """Each rule folded over the past; None while a statistic is not known."""
    table: ArmedTable = field(init=False)
    revised: bool = False
    """Whether `table` was made anew by an ack since the last observation."""

    def __post_init__(self) -> None:
        """Make the series and memories that the policy needs."""
        self.series = {signal: Series(sizes) for signal, sizes in self.policy.windows().items()}
        self.rules = {rule.name: RuleMemory() for rule in self.policy.rules}
        self.expect(self.measured)
        self.rearm()

    def expect(self, signals: tuple[str, ...]) -> None:
        """Take in which signals the job measures: rules that need others are inactive."""
        self.measured, known = signals, frozenset(signals)
        self.inactive = frozenset(
            rule.name for rule in self.policy.rules if self.policy.missing(rule, known)
        )

    def statistic(self, name: str, signal: str, size: int) -> float | None:
        """Return a statistic of the accepted past, or None while it is not known."""
        return self.series[signal].statistic(name, size)

    def refold(self) -> None:
        """Fold every rule over the past as it is now."""
        self.residuals = {
            rule.name: None if rule.name in self.inactive else fold(rule.when, self.statistic)
            for rule in self.policy.rules
        }

    def rearm(self) -> None:
        """Fold every rule and make the table for the next pending step."""
        self.refold()
        self.table = _table(self)

    def rewind(self, step: int) -> None:
        """Forget the past of `step` and later, as if the run had never been there."""
        for series in self.series.values():
            series.rewind(step)
        self.flagged = []
        for memory in self.rules.values():
            memory.streak = 0

    def rule(self, name: str) -> Rule | None:
        """Return the policy's rule of that name."""
        return next((rule for rule in self.policy.rules if rule.name == name), None)


def snapshot(state: State) -> dict[str, Any]:
    """Return the state as JSON-able values, without what the policy and the past determine."""
    return {
        "version": SNAPSHOT_VERSION,
        "policy_version": state.policy.version,
        "measured": list(state.measured),
        "epoch": state.epoch,
        "seq": state.seq,
        "step": state.step,
        "tick": state.tick,
        "lr_factor": state.lr_factor,
        "values": state.values,
        "flagged": state.flagged,
        "series": {name: [s.steps, s.values] for name, s in state.series.items()},
        "rules": {name: asdict(memory) for name, memory in state.rules.items()},
        "watches": [asdict(watch) for watch in state.watches],
        "outstanding": [asdict(directive) for directive in state.outstanding.values()],
        "revised": state.revised,
        "counts": [[list(key), count] for key, count in state.counts.items()],
    }


def restore(data: dict[str, Any], policy: Policy) -> State:
    """Return the state that `snapshot` wrote; rules and signals new to the policy start empty.

    Raises:
        ValueError: If the snapshot is of another version of this format.
    """
    if data["version"] != SNAPSHOT_VERSION:
        raise ValueError(
            f"snapshot version {data['version']}, this trimtab reads {SNAPSHOT_VERSION}"
        )
    state = State(policy)
    for name in ("epoch", "seq", "step", "tick", "lr_factor", "values", "revised"):
        setattr(state, name, data[name])
    state.expect(tuple(data["measured"]))
    state.flagged = [(step, values) for step, values in data["flagged"]]
    for name, (steps, values) in data["series"].items():
        if name in state.series:
            state.series[name].refill(steps, values)
    for name, memory in data["rules"].items():
        if name in state.rules:
            state.rules[name] = RuleMemory(**memory)
    state.watches = [
        Watch(**(watch | {"intervention": _intervention(watch["intervention"])}))
        for watch in data["watches"]
    ]
    directives = (Directive(**(d | {"action": Action(d["action"])})) for d in data["outstanding"])
    state.outstanding = {directive.id: directive for directive in directives}
    state.counts = Counter({tuple(key): count for key, count in data["counts"]})
    state.rearm()
    return state


def adopt(state: State, policy: Policy) -> State:
    """Return the state under another policy: the past stays, rules of the same name go on."""
    adopted = restore(snapshot(state), policy)
    adopted.revised = True
    return adopted


def _intervention(data: dict[str, Any]) -> Intervention:
    return Intervention(
        **(data | {"action": Action(data["action"]), "outcome": Outcome(data["outcome"])})
    )


def _table(state: State) -> ArmedTable:
    """Return the table for the next pending step."""
    rules = []
    for rule in state.policy.rules:
        residual, memory = state.residuals[rule.name], state.rules[rule.name]
        active = rule.armed and state.step + 1 >= rule.after_steps
        if active and residual is not None and memory.could_fire(rule, state.tick + 1):
            budget = memory.budget(rule) if rule.cooldown_steps == 0 else 1
            rules.append(ArmedRule(name=rule.name, predicate=residual, budget=budget))
    return ArmedTable(
        epoch=state.epoch,
        seq=state.seq,
        expires_seq=state.seq + state.policy.expires_steps,
        lr_factor=state.lr_factor,
        budget=state.policy.rebaseline_steps - len(state.flagged),
        rules=tuple(rules),
        policy_version=state.policy.version,
    )
