"""The engine: one event moves a run's state and says what to send and what to write down.

No clock, no I/O, no randomness: the same events give the same outputs, live, in a replay of the
journal and over an old log.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from trimtab.controller.engine.arbiter import counted, decide, intervened, watched
from trimtab.controller.engine.model import (
    Ack,
    Action,
    ArmedTable,
    Decision,
    Directive,
    Event,
    Observation,
    Outcome,
    Rebaselined,
    Record,
    Registered,
    VerdictKind,
)
from trimtab.controller.engine.policy import Rule
from trimtab.controller.engine.signals import SCALED_BY_LR
from trimtab.controller.engine.state import State
from trimtab.controller.engine.verdict import finite, is_true, judge


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
        intervened(
            state,
            directive,
            Outcome.FAILED,
            "the job restarted before it answered",
            known_seq=state.seq,
        )
        for directive in state.outstanding.values()
    )
    state.outstanding = {}
    state.epoch, state.seq, state.lr_factor = event.epoch, -1, 1.0
    state.expect(event.signals)
    _forget_lr_scale(state)  # factors end with the process; who restarts may set another LR
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
        state.refold()
    _audit(state, seen)

    healthy = finite(seen.values.values())
    matched = {rule.name for rule in state.policy.rules if healthy and _matches(state, rule, seen)}
    for rule in state.policy.rules:
        state.rules[rule.name].saw(rule, state.tick, seen.step, matched=rule.name in matched)
    records = list(decide(state, seen))
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
    record = intervened(state, directive, ack.outcome, ack.detail, known_seq=state.seq)
    if ack.outcome is Outcome.PENDING:
        rule = state.rule(directive.rule)
        watched(state, record, rule.recover_within_steps if rule else 0)
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
    return is_true(residual, seen.values)


def _audit(state: State, seen: Observation) -> None:
    """Count a verdict that is not what the table it names says: the proof that both sides agree."""
    table = state.table
    if table.seq != seen.verdict.table_seq or seen.seq != table.seq + 1:
        return
    if state.revised:  # the job may have judged by the table before or after the ack
        return
    verdict = judge(table, seen.values, seq=seen.seq, lr_factor=seen.lr_factor, spent={})
    if verdict != seen.verdict:
        state.counts["verdict_mismatch",] += 1


def _forget_lr_scale(state: State) -> None:
    for signal in SCALED_BY_LR & state.series.keys():
        state.series[signal].refill([], [])


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
            yield counted(
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
