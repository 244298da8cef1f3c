"""A policy's expressions, split and compiled: what is worked out from the past, what is left.

Made once per policy.  Parts that do not depend on the pending step become terms, each computed once
a step for all rules; what is left of a rule is its predicate, part of the armed table.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from trimtab.controller.engine.expression import (
    COMPARISONS,
    OVER_LAYERS,
    Among,
    Constant,
    Evaluate,
    Node,
    Operation,
    Operator,
    Past,
    Signal,
    Term,
    Tracked,
    Value,
    Vector,
    compiled,
    is_condition,
    is_each,
    lifted,
    pending,
    signals,
    walk,
)
from trimtab.controller.engine.model import ARMED_ACTIONS, Action, Change, Layout, Residual
from trimtab.controller.engine.policy import OUTCOME_WINDOW_STEPS, ActionCall, Policy, Rule
from trimtab.controller.engine.series import DECAYING, Needs, window_of
from trimtab.controller.engine.signals import DATASET_LOSS, SCALED_BY_LR, datasets

SeriesKey = tuple[str, bool, bool]
"""(signal, whether per layer group or dataset, whether of its logarithm)."""

UPDATE_NORM = Signal("update_norm")


class History(Protocol):
    """What terms are worked out from."""

    def statistic(self, past: Past) -> Value | None:
        """Return a statistic of the accepted past; None (in a vector NaN) while unknown."""

    def tracked(self, counter: Tracked) -> float:
        """Return a counter over the past of a condition."""

    def last(self, signal: Signal) -> Value | None:
        """Return the last known value of a late signal."""

    def among(self, patterns: tuple[str, ...]) -> Vector:
        """Return 1 for each layer group that matches, else 0."""


Term_ = Callable[[History], Value | None]


class Program:
    """What the engine runs in place of a policy's expressions."""

    def __init__(self, policy: Policy) -> None:
        self._indices: dict[Node, int] = {}
        self.predicates: dict[str, Node] = {}
        """Rule to what is left of its `when`."""
        self.holds: dict[str, Evaluate] = {}
        """Rule to whether it matches a pending step."""
        self.uses: dict[str, frozenset[int]] = {}
        """Rule to the terms that its predicate needs."""
        self.tracked: dict[Node, tuple[Evaluate, frozenset[int]]] = {}
        """Condition of a counter to whether it holds, and the terms that it needs."""
        self.track_sizes: dict[Node, int] = {}
        """The same to the longest window of its counters."""
        self.arguments: dict[int, dict[str, tuple[Node, Evaluate, frozenset[int]]]] = {}
        """id of an ActionCall to its arguments, the terms that each needs with it."""
        residuals: list[Residual] = []
        self.residual_of: dict[tuple[str, int], int] = {}
        """(rule, rung) to its residual, where the rung has an armed action."""
        self.flags: dict[str, frozenset[SeriesKey]] = {}
        """Rule to the series whose past it compares with: its matches stay out of them."""

        for rule in policy.rules:
            self._add_rule(rule)
        for rule, rung, call in policy.calls():
            self._add_arguments(call)
            if call.action in ARMED_ACTIONS and rule.acts:
                self.residual_of[rule.name, rung] = len(residuals)
                residuals.append(self._residual(policy, rule, call))
        self.residuals = tuple(residuals)
        self.needs = self._needs()
        parts = [part for node in self._indices for part in walk(node)]
        self.late = {(s.name, s.each) for s in parts if isinstance(s, Signal) and s.late}
        """(late signal, whether per layer group) that rules speak of."""
        self.terms: tuple[Term_, ...] = tuple(_term(node) for node in self._indices)

    def _add_rule(self, rule: Rule) -> None:
        when = _restricted(rule.when, rule.layers) if rule.layers else rule.when
        predicate = self._split(when)
        self.predicates[rule.name] = predicate
        self.holds[rule.name] = compiled(predicate)
        self.uses[rule.name] = _terms(predicate)
        self.flags[rule.name] = frozenset(
            (part.signal.name, part.signal.each, part.log)
            for part in walk(rule.when)
            if isinstance(part, Past)
        )
        for part in walk(when):
            if isinstance(part, Tracked):
                condition = self._split(part.condition)
                self.tracked[part.condition] = (compiled(condition), _terms(condition))
                size = max(part.size, self.track_sizes.get(part.condition, 0))
                self.track_sizes[part.condition] = size

    def _add_arguments(self, call: ActionCall) -> None:
        split = {name: self._split(node) for name, node in call.arguments.items()}
        self.arguments[id(call)] = {
            name: (node, compiled(node), _terms(node)) for name, node in split.items()
        }

    def _residual(self, policy: Policy, rule: Rule, call: ActionCall) -> Residual:
        predicate = self.predicates[rule.name]
        clip_to = None
        if call.action is Action.CLIP_UPDATE:
            clip_to = self.arguments[id(call)]["to"][0]
        paused = {change for change, steps in rule.hold_off.items() if steps}
        paused |= policy.rearm_on - {Change.LR_SCHEDULE}
        if Change.LR_SCHEDULE in policy.rearm_on and scaled_by_lr(rule.when):
            paused.add(Change.LR_SCHEDULE)
        counts = any(isinstance(part, Tracked) for part in walk(rule.when))
        return Residual(
            rule=rule.name,
            predicate=predicate,
            clip_to=clip_to,
            cause=rule.cause,
            paused_by=tuple(sorted(paused)),
            fresh=rule.for_steps > 1 or counts,
        )

    def _split(self, node: Node) -> Node:
        """Return the tree with every largest part of the past in it replaced by a term."""
        if isinstance(node, Constant):
            return node
        if not pending(node) and _is_number(node):
            index = self._indices.setdefault(node, len(self._indices))
            return Term(index, is_each(node))
        if isinstance(node, Operation):
            parts = tuple(self._split(operand) for operand in node.operands)
            return replace(node, operands=parts)
        return node

    def _needs(self) -> dict[SeriesKey, Needs]:
        pasts = {part for node in self._indices for part in walk(node) if isinstance(part, Past)}
        for statistic in ("median", "spread"):
            pasts.add(Past(statistic, Signal("loss"), OUTCOME_WINDOW_STEPS))
        found: dict[SeriesKey, set[Past]] = {}
        for past in pasts:
            found.setdefault((past.signal.name, past.signal.each, past.log), set()).add(past)
        return {key: _needs_of(parts, log=key[2]) for key, parts in found.items()}


def needed(rule: Rule) -> frozenset[Signal]:
    """Return the signals without which a rule cannot match or act."""
    nodes = [rule.when]
    clips = False
    for rung in rule.rungs:
        for call in rung.do:
            nodes += call.arguments.values()
            clips |= call.action is Action.CLIP_UPDATE
    found = frozenset().union(*(signals(node) for node in nodes))
    return found | {UPDATE_NORM} if clips else found


def missing(rule: Rule, layout: Layout) -> frozenset[str]:
    """Return the signals that a rule needs and the job does not measure, as people write them."""
    absent = set()
    for signal in needed(rule):
        if signal.name == DATASET_LOSS:
            if not datasets(layout.signals):
                absent.add(DATASET_LOSS)
        elif signal.each and signal.name not in layout.layer_signals:
            absent.add(f"{signal.name} per layer group")
        elif not signal.each and signal.name not in layout.signals:
            absent.add(signal.name)
    return frozenset(absent)


def scaled_by_lr(node: Node) -> bool:
    """Return whether a tree speaks of a signal that is proportional to the LR."""
    return any(signal.name in SCALED_BY_LR for signal in signals(node))


def _needs_of(pasts: set[Past], *, log: bool) -> Needs:
    windows, decays, lag = set(), set(), 0
    for past in pasts:
        if past.statistic in DECAYING:
            decays.add(past.size)
        elif past.statistic == "lag":
            lag = max(lag, int(past.size))
        else:
            windows.add(window_of(past.statistic, int(past.size)))
    return Needs(windows=frozenset(windows), decays=frozenset(decays), lag=lag, log=log)


def _is_number(node: Node) -> bool:
    """Return whether a tree is arithmetic alone, without a condition in it."""
    match node:
        case Operation(operator=operator, operands=operands):
            return (
                not is_condition(node)
                and operator not in OVER_LAYERS
                and operator is not Operator.NUMBER
                and all(_is_number(operand) for operand in operands)
            )
    return True


def _restricted(node: Node, patterns: tuple[str, ...]) -> Node:
    """Return the tree that looks only at the layer groups which match a pattern."""
    if isinstance(node, Tracked):
        return replace(node, condition=_restricted(node.condition, patterns))
    if not isinstance(node, Operation):
        return node
    operands = tuple(_restricted(operand, patterns) for operand in node.operands)
    if node.operator in OVER_LAYERS and not _over_datasets(operands[0]):
        among = Operation(Operator.GT, (Among(patterns), Constant(0.0)))
        operands = (Operation(Operator.AND, (operands[0], among)), *operands[1:])
    return replace(node, operands=operands)


def _over_datasets(condition: Node) -> bool:
    return any(signal.name == DATASET_LOSS and signal.each for signal in signals(condition))


def _terms(node: Node) -> frozenset[int]:
    return frozenset(part.index for part in walk(node) if isinstance(part, Term))


def _term(node: Node) -> Term_:
    """Return a function that works a part of the past out; None while it is not known."""
    match node:
        case Constant(value=value):
            return lambda _: value
        case Past():
            return lambda history: history.statistic(node)
        case Tracked():
            return lambda history: history.tracked(node)
        case Signal():
            return lambda history: history.last(node)
        case Among(patterns=patterns):
            return lambda history: history.among(patterns)
        case Operation(operator=operator, operands=operands):
            apply = lifted(operator, operands)
            parts = [_term(operand) for operand in operands]

            def work_out(history: History) -> Value | None:
                values = [part(history) for part in parts]
                if any(value is None for value in values):
                    return None
                result: Value = apply(*values)
                return result

            return work_out
    raise TypeError(f"{node} is no term")


def comparisons(node: Node) -> Iterator[Operation]:
    """Yield every comparison of a tree that was spelled by a person."""
    for part in walk(node):
        if isinstance(part, Operation) and part.operator in COMPARISONS and part.text:
            yield part
