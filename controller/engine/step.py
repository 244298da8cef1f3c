"""The engine: one event moves a run's state and says what to send and what to write down.

No clock, no I/O, no randomness: the same events give the same outputs, live, in a replay of the
journal and over an old log.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from trimtab.controller.engine.expression import evaluate, evidence, fold, signals
from trimtab.controller.engine.model import (
    REFLEX,
    Ack,
    Action,
    ArmedTable,
    Decision,
    Directive,
    Event,
    Intervention,
    Mode,
    Observation,
    Outcome,
    Rebaselined,
    Record,
    Registered,
    VerdictKind,
)
from trimtab.controller.engine.outcome import Watch, band
from trimtab.controller.engine.policy import ActionCall, Rule
from trimtab.controller.engine.signals import SCALED_BY_LR
from trimtab.controller.engine.state import State
from trimtab.controller.engine.verdict import finite, judge

REFLEX_RECOVER_WITHIN_STEPS = 50
"""The reflex has no entry in the policy; its vetoes are watched for this many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What one event leads to."""

    table: ArmedTable | None = None
    """To be sent; None when nothing changed."""
    directives: tuple[Directive, ...] = ()
    """To be sent once `records` are in the journal."""
    records: tuple[Record, ...] = ()


def step(state: State, event: Event) -> Outputs:
    """Move the state by one event and return what follows from it."""
    match event:
        case Registered():
            return _register(state, event)
        case Observation():
            return _observe(state, event)
        case Ack():
            return _acknowledge(state, event)
    assert_never(event)


def _register(state: State, event: Registered) -> Outputs:
    if event.epoch <= state.epoch:
        return Outputs(table=state.table)
    records = tuple(
        _closed(
            state, directive, Outcome.FAILED, "the job restarted before it answered"
        )
        for directive in state.outstanding.values()
    )
    state.outstanding = {}
    state.epoch, state.seq, state.lr_factor = event.epoch, -1, 1.0
    state.measured = event.signals
    state.rearm()
    return Outputs(table=state.table, records=records)


def _observe(state: State, seen: Observation) -> Outputs:
    if seen.seq <= state.seq:  # sent again after a reconnect
        return Outputs(table=state.table)
    state.tick += seen.seq - state.seq
    if seen.step <= state.step:
        state.rewind(seen.step)
        state.refold()
    if seen.lr_factor != state.lr_factor:
        _forget_lr_scale(state)
    _audit(state, seen)

    healthy = finite(seen.values.values())
    matched = {
        rule.name
        for rule in state.policy.rules
        if healthy and _matches(state, rule, seen)
    }
    for rule in state.policy.rules:
        state.rules[rule.name].saw(
            rule, state.tick, seen.step, matched=rule.name in matched
        )
    records = list(_decide(state, seen))
    directives = tuple(
        state.outstanding[r.id]
        for r in records
        if isinstance(r, Decision) and r.id in state.outstanding
    )
    flagged = bool(matched) or not healthy or seen.verdict.kind is VerdictKind.VETO
    records += _outcomes(state, seen)
    records += _learn(state, seen, flagged=flagged)

    state.seq, state.step, state.lr_factor = seen.seq, seen.step, seen.lr_factor
    state.values = dict(seen.values)
    state.revised = False
    state.rearm()
    return Outputs(table=state.table, directives=directives, records=tuple(records))


def _acknowledge(state: State, ack: Ack) -> Outputs:
    directive = state.outstanding.pop(ack.id, None)
    if directive is None:  # answered before
        return Outputs()
    record = _closed(state, directive, ack.outcome, ack.detail)
    if ack.outcome is Outcome.PENDING:
        rule = state.rule(directive.rule)
        state.watches.append(
            Watch(
                intervention=record,
                band=band(state.series["loss"]),
                deadline=state.tick + (rule.recover_within_steps if rule else 0),
            )
        )
        if directive.action is Action.ROLLBACK:
            state.rewind(ack.step)
            state.step = ack.step - 1
    state.revised = True
    state.rearm()
    return Outputs(table=state.table, records=(record,))


def _matches(state: State, rule: Rule, seen: Observation) -> bool:
    residual = state.residuals[rule.name]
    if residual is None or seen.step < rule.after_steps:
        return False
    return signals(residual) <= seen.values.keys() and bool(
        evaluate(residual, seen.values)
    )


def _audit(state: State, seen: Observation) -> None:
    """Count a verdict that is not what the table it names says: the proof that both sides agree."""
    table = state.table
    if (
        table is None
        or table.seq != seen.verdict.table_seq
        or seen.seq != table.seq + 1
    ):
        return
    if state.revised:  # the job may have judged by the table before or after the ack
        return
    verdict = judge(
        table, seen.values, seq=seen.seq, lr_factor=seen.lr_factor, spent={}
    )
    if verdict != seen.verdict:
        state.counts["verdict_mismatch",] += 1


def _forget_lr_scale(state: State) -> None:
    for signal in SCALED_BY_LR & state.series.keys():
        state.series[signal].refill([], [])
    state.refold()


def _decide(state: State, seen: Observation) -> Iterator[Record]:
    """Turn the verdict that was given and the rules that fire into decisions, in order."""
    vetoed = seen.verdict.rule if seen.verdict.kind is VerdictKind.VETO else ""
    if (
        vetoed and state.rule(vetoed) is None
    ):  # the reflex, or a rule of an older policy
        lines = tuple(
            f"{name} = {value}"
            for name, value in seen.values.items()
            if not math.isfinite(value)
        )
        call = ActionCall(action=Action.SKIP_BATCH, arguments={})
        yield from _vetoed(
            state, seen, vetoed, call, lines, REFLEX_RECOVER_WITHIN_STEPS
        )
    for rule in state.policy.rules:
        memory = state.rules[rule.name]
        fires = memory.fires(rule, state.tick)
        if not fires and rule.name != vetoed:
            continue
        lines = evidence(rule.when, seen.values, state.statistic)
        made = [
            record
            for call in rule.do
            for record in _act(
                state, seen, rule, call, lines, fires=fires, vetoed=vetoed
            )
        ]
        if made:
            memory.decide(rule, state.tick)
        yield from made


def _act(
    state: State,
    seen: Observation,
    rule: Rule,
    call: ActionCall,
    lines: tuple[str, ...],
    *,
    fires: bool,
    vetoed: str,
) -> Iterator[Record]:
    if call.action is Action.SKIP_BATCH and rule.mode is Mode.ACT:
        if rule.name == vetoed:
            within = rule.recover_within_steps
            yield from _vetoed(
                state, seen, rule.name, call, lines, within, rule.summary
            )
        elif not vetoed:
            decision = _decision(state, seen, rule, call, lines, {})
            yield decision
            yield _intervened(
                state, decision, Outcome.MISSED, "no table in force held the rule"
            )
        return
    if not fires:
        return
    arguments = _arguments(state, seen, rule, call)
    directive = rule.mode is Mode.ACT and call.action in (
        Action.SCALE_LR,
        Action.ROLLBACK,
    )
    if directive and state.outstanding:  # one at a time: the job is between two states
        return
    decision = _decision(state, seen, rule, call, lines, arguments or {})
    yield decision
    if directive and arguments is None:
        yield _intervened(
            state, decision, Outcome.REFUSED, "an argument is not known or not sane"
        )
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


def _vetoed(
    state: State,
    seen: Observation,
    name: str,
    call: ActionCall,
    lines: tuple[str, ...],
    recover_within: int,
    summary: str = "",
) -> Iterator[Record]:
    decision = Decision(
        id=f"{state.epoch}-{seen.seq}-{name}-{call.action}",
        epoch=state.epoch,
        seq=seen.seq,
        step=seen.step,
        rule=name,
        action=call.action,
        mode=Mode.ACT,
        arguments={},
        evidence=lines,
        summary=summary,
    )
    state.counts["decision", name, call.action, Mode.ACT] += 1
    yield decision
    intervention = _intervened(state, decision, Outcome.PENDING)
    state.watches.append(
        Watch(
            intervention=intervention,
            band=band(state.series["loss"]),
            deadline=state.tick + recover_within,
        )
    )
    yield intervention


def _decision(
    state: State,
    seen: Observation,
    rule: Rule,
    call: ActionCall,
    lines: tuple[str, ...],
    arguments: Mapping[str, float],
) -> Decision:
    state.counts["decision", rule.name, call.action, rule.mode] += 1
    return Decision(
        id=f"{state.epoch}-{seen.seq}-{rule.name}-{call.action}",
        epoch=state.epoch,
        seq=seen.seq,
        step=seen.step,
        rule=rule.name,
        action=call.action,
        mode=rule.mode,
        arguments=arguments,
        evidence=lines,
        summary=rule.summary,
    )


def _closed(
    state: State, directive: Directive, outcome: Outcome, detail: str
) -> Intervention:
    return _count(
        state,
        Intervention(
            id=directive.id,
            epoch=directive.epoch,
            seq=directive.seq,
            step=directive.step,
            rule=directive.rule,
            action=directive.action,
            outcome=outcome,
            outcome_seq=state.seq,
            detail=detail,
        ),
    )


def _intervened(
    state: State, decision: Decision, outcome: Outcome, detail: str = ""
) -> Intervention:
    return _count(
        state,
        Intervention(
            id=decision.id,
            epoch=decision.epoch,
            seq=decision.seq,
            step=decision.step,
            rule=decision.rule,
            action=decision.action,
            outcome=outcome,
            outcome_seq=decision.seq,
            detail=detail,
        ),
    )


def _count(state: State, intervention: Intervention) -> Intervention:
    key = (intervention.rule, intervention.action)
    if intervention.outcome is Outcome.PENDING:
        state.counts["intervention", *key] += 1
    else:
        state.counts["outcome", *key, intervention.outcome] += 1
    return intervention


def _outcomes(state: State, seen: Observation) -> Iterator[Record]:
    """Close the interventions whose outcome is known now."""
    applied = seen.verdict.kind is VerdictKind.APPLY
    loss = seen.values.get("loss") if applied else None
    watching = []
    for watch in state.watches:
        outcome = watch.saw(loss, state.tick)
        if outcome is Outcome.PENDING:
            watching.append(watch)
        else:
            yield _count(
                state,
                replace(watch.intervention, outcome=outcome, outcome_seq=seen.seq),
            )
    state.watches = watching


def _learn(state: State, seen: Observation, *, flagged: bool) -> Iterator[Record]:
    """Let the step into the past, or keep it out; accept a new level that lasts."""
    if not flagged:
        state.flagged = []
        _push(state, seen.step, seen.values)
        return
    state.flagged.append((seen.step, dict(seen.values)))
    if len(state.flagged) < state.policy.rebaseline_steps:
        return
    level = [(at, values) for at, values in state.flagged if finite(values.values())]
    state.flagged = []
    if not level:  # nothing but NaN: no level to accept
        return
    for series in state.series.values():
        series.refill([], [])
    for at, values in level:
        _push(state, at, values)
    state.counts["rebaseline",] += 1
    yield Rebaselined(
        epoch=state.epoch,
        seq=seen.seq,
        step=seen.step,
        flagged_steps=state.policy.rebaseline_steps,
    )


def _push(state: State, step: int, values: Mapping[str, float]) -> None:
    for name, series in state.series.items():
        if name in values:
            series.push(step, values[name])
