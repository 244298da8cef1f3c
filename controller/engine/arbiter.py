"""From rules that fire to decisions: who acts, on what evidence, with what arguments.

Called by engine.step once per observation.  At most one directive is on its way at a time; of the
rules that would veto a step, the first in the policy's order does.
"""

import math
from collections.abc import Iterator, Mapping

from trimtab.controller.engine.expression import evaluate, evidence, fold, signals
from trimtab.controller.engine.model import (
    Action,
    Decision,
    Directive,
    Intervention,
    Mode,
    Observation,
    Outcome,
    Record,
    VerdictKind,
)
from trimtab.controller.engine.outcome import Watch, band
from trimtab.controller.engine.policy import ActionCall, Rule
from trimtab.controller.engine.state import State

REFLEX_RECOVER_WITHIN_STEPS = 50
"""The reflex has no entry in the policy; its vetoes are watched for this many steps."""


def decide(state: State, seen: Observation) -> Iterator[Record]:
    """Yield what follows from the verdict that was given and the rules that fire, in order."""
    vetoed = seen.verdict.rule if seen.verdict.kind is VerdictKind.VETO else ""
    if vetoed and state.rule(vetoed) is None:
        yield from _vetoed_by_no_rule(state, seen, vetoed)
    for rule in state.policy.rules:
        memory = state.rules[rule.name]
        fires = memory.fires(rule, state.tick)
        if not fires and rule.name != vetoed:
            continue
        lines = evidence(rule.when, seen.values, state.statistic)
        made: list[Record] = []
        for call in rule.do:
            if call.action is Action.SKIP_BATCH and rule.mode is Mode.ACT:
                made += _skip(state, seen, rule, lines, vetoed=vetoed)
            elif fires:
                made += _act(state, seen, rule, call, lines)
        if made:
            memory.decide(rule, state.tick)
        yield from made


def _vetoed_by_no_rule(state: State, seen: Observation, name: str) -> Iterator[Record]:
    """Write down a veto of the reflex, or of a rule that the policy no longer has."""
    lines = tuple(
        f"{signal} = {value}" for signal, value in seen.values.items() if not math.isfinite(value)
    )
    decision = _decision(
        state, seen, rule=name, action=Action.SKIP_BATCH, mode=Mode.ACT, arguments={}, lines=lines
    )
    yield decision
    yield watched(state, intervened(state, decision), REFLEX_RECOVER_WITHIN_STEPS)


def _skip(
    state: State, seen: Observation, rule: Rule, lines: tuple[str, ...], *, vetoed: str
) -> Iterator[Record]:
    """Write down what became of a rule's veto: given, missed, or another rule's."""
    if vetoed not in ("", rule.name):
        return
    decision = _decision(
        state,
        seen,
        rule=rule.name,
        action=Action.SKIP_BATCH,
        mode=rule.mode,
        arguments={},
        lines=lines,
        summary=rule.summary,
    )
    yield decision
    if vetoed:
        yield watched(state, intervened(state, decision), rule.recover_within_steps)
    else:
        yield intervened(state, decision, Outcome.MISSED, "no table in force held the rule")


def _act(
    state: State, seen: Observation, rule: Rule, call: ActionCall, lines: tuple[str, ...]
) -> Iterator[Record]:
    """Decide an action that the job does not take by itself."""
    directive = rule.mode is Mode.ACT and call.action in (Action.SCALE_LR, Action.ROLLBACK)
    if directive and state.outstanding:  # one at a time: the job is between two states
        return
    arguments = _arguments(state, seen, rule, call)
    decision = _decision(
        state,
        seen,
        rule=rule.name,
        action=call.action,
        mode=rule.mode,
        arguments=arguments or {},
        lines=lines,
        summary=rule.summary,
    )
    yield decision
    if directive and arguments is None:
        yield intervened(state, decision, Outcome.REFUSED, "an argument is not known or not sane")
    elif directive:
        state.outstanding[decision.id] = Directive(
            id=decision.id,
            epoch=state.epoch,
            seq=seen.seq,
            step=seen.step,
            expires_seq=seen.seq + state.policy.expires_steps,
            rule=rule.name,
            action=call.action,
            arguments=decision.arguments,
        )


def _arguments(
    state: State, seen: Observation, rule: Rule, call: ActionCall
) -> dict[str, float] | None:
    """Return an action's arguments as numbers, or None when one is unknown or out of its range."""
    numbers = {}
    for name, node in call.arguments.items():
        residual = fold(node, state.statistic)
        if residual is None or not signals(residual) <= seen.values.keys():
            return None
        numbers[name] = float(evaluate(residual, seen.values))
    if call.action is Action.SCALE_LR and not 0 < numbers["by"] <= 1:
        return None
    if call.action is Action.ROLLBACK:
        # Sound points lie `soak` clean steps before the onset, not before the alarm.
        onset = state.rules[rule.name].onset_step
        numbers["before_step"] = float(onset) - numbers.pop("soak")
    return numbers


def _decision(
    state: State,
    seen: Observation,
    *,
    rule: str,
    action: Action,
    mode: Mode,
    arguments: Mapping[str, float],
    lines: tuple[str, ...],
    summary: str = "",
) -> Decision:
    state.counts["decision", rule, action, mode] += 1
    return Decision(
        id=f"{state.epoch}-{seen.seq}-{rule}-{action}",
        epoch=state.epoch,
        seq=seen.seq,
        step=seen.step,
        rule=rule,
        action=action,
        mode=mode,
        arguments=arguments,
        evidence=lines,
        summary=summary,
    )


def intervened(
    state: State,
    cause: Decision | Directive,
    outcome: Outcome = Outcome.PENDING,
    detail: str = "",
    *,
    known_seq: int | None = None,
) -> Intervention:
    """Return, and count, the intervention that a decision or a directive became.

    Its outcome is known at `known_seq`; by default on the very step of the decision.
    """
    return counted(
        state,
        Intervention(
            id=cause.id,
            epoch=cause.epoch,
            seq=cause.seq,
            step=cause.step,
            rule=cause.rule,
            action=cause.action,
            outcome=outcome,
            outcome_seq=cause.seq if known_seq is None else known_seq,
            detail=detail,
        ),
    )


def counted(state: State, intervention: Intervention) -> Intervention:
    """Count an intervention when it is carried out and when its outcome is known."""
    key = (intervention.rule, intervention.action)
    if intervention.outcome is Outcome.PENDING:
        state.counts["intervention", *key] += 1
    else:
        state.counts["outcome", *key, intervention.outcome] += 1
    return intervention


def watched(state: State, intervention: Intervention, within_steps: int) -> Intervention:
    """Watch the loss after an intervention that was carried out."""
    state.watches.append(
        Watch(
            intervention=intervention,
            band=band(state.series["loss"]),
            deadline=state.tick + within_steps,
        )
    )
    return intervention
