"""The engine: one event moves a run's state and says what to send and what to write down.

No clock, no I/O, no randomness: the same events give the same outputs, live, in a replay of the
journal and over an old log.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from trimtab.controller.engine import evidence
from trimtab.controller.engine.arbiter import climb, counted, decide, intervened, watched
from trimtab.controller.engine.expression import Seen
from trimtab.controller.engine.model import (
    Ack,
    Action,
    ArmedTable,
    Change,
    Climbed,
    Decision,
    Directive,
    Event,
    Graded,
    Observation,
    Outcome,
    Rebaselined,
    Record,
    Registered,
    VerdictKind,
)
from trimtab.controller.engine.policy import Rule
from trimtab.controller.engine.program import SeriesKey
from trimtab.controller.engine.signals import DATASET_LOSS, datasets
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
    if state.epoch >= 0:
        _change(state, Change.RESUME)
    state.epoch, state.seq, state.lr_factor = event.epoch, -1, 1.0
    state.expect(event.layout)
    state.forget(scaled_only=True)  # factors end with the process; the LR may be another one
    state.rearm()
    return Outputs(table=state.table, records=records)


def _observe(state: State, observation: Observation) -> Outputs:
    if observation.seq <= state.seq:  # sent again after a reconnect
        return Outputs(table=state.table)
    audited = state.table
    state.tick += observation.seq - state.seq
    _catch_up(state, observation)
    _audit(state, audited, observation)

    seen = state.seen(observation)
    healthy = finite(observation.values.values())
    matched = [
        rule
        for rule in state.policy.rules
        if healthy and observation.step >= rule.after_steps and _matches(state, rule, seen)
    ]
    records = list(_remember_matches(state, observation, matched))
    vetoed = observation.verdict.kind is VerdictKind.VETO
    state.vetoes_in_row = state.vetoes_in_row + 1 if vetoed else 0
    state.nonfinite_in_row = 0 if healthy else state.nonfinite_in_row + 1

    records += decide(state, observation, seen)
    directives = tuple(
        state.outstanding[r.id]
        for r in records
        if isinstance(r, Decision) and r.id in state.outstanding
    )
    records += _outcomes(state, observation)
    records += _graded(state, observation)
    _track(state, observation, seen, healthy=healthy)
    out = vetoed or not healthy
    records += _learn(state, observation, seen, _flags(state, seen, matched), out=out)

    state.seq, state.step = observation.seq, observation.step
    state.lr_factor = observation.lr_factor
    state.values = dict(observation.values)
    state.revised = False
    state.rearm()
    return Outputs(table=state.table, directives=directives, records=tuple(records))


def _catch_up(state: State, observation: Observation) -> None:
    """Take in what changed around the run since the step before."""
    refold = False
    if observation.step <= state.step:
        state.rewind(observation.step)
        _change(state, Change.RESUME)
        refold = True
    if observation.lr_factor != state.lr_factor:
        state.forget(scaled_only=True)
        refold = True
    for change in observation.declared:
        _change(state, change)
        refold = True
    longest = max(
        [state.policy.run_limit.window_steps]
        + [limit.window_steps for limit in state.policy.cause_limits.values()]
    )
    state.acted = [entry for entry in state.acted if entry[0] > state.tick - longest]
    if refold:
        state.fold()


def _change(state: State, change: Change) -> None:
    """Hold off and re-arm as the policy says."""
    state.changed[change] = state.tick
    if change in state.policy.rearm_on:
        state.forget(scaled_only=change is Change.LR_SCHEDULE)


def _acknowledge(state: State, ack: Ack) -> Outputs:
    directive = state.outstanding.pop(ack.id, None)
    if directive is None:  # answered before
        return Outputs()
    rule = state.rule(directive.rule)
    record = intervened(state, directive, ack.outcome, ack.detail, known_seq=state.seq)
    records: list[Record] = [record]
    if ack.outcome is Outcome.PENDING:
        watched(state, record, rule.recover_within_steps if rule else 0, rule)
        if directive.action is Action.ROLLBACK:
            state.rewind(ack.step)
            state.step = ack.step - 1
    elif rule is not None:
        at = Observation(seq=state.seq, step=state.step, values={})
        records += climb(state, at, rule, f"{directive.action}: {ack.outcome}")
    state.revised = True
    state.rearm()
    return Outputs(table=state.table, records=tuple(records))


def _matches(state: State, rule: Rule, seen: Seen) -> bool:
    if rule.name in state.inactive or state.holding_off(rule, state.tick):
        return False
    return state.known(state.program.uses[rule.name]) and is_true(
        state.program.holds[rule.name], seen
    )


def _remember_matches(
    state: State, observation: Observation, matched: list[Rule]
) -> Iterator[Record]:
    names = {rule.name for rule in matched}
    for rule in state.policy.rules:
        memory = state.rules[rule.name]
        if memory.saw(rule, state.tick, observation.step, matched=rule.name in names):
            yield Climbed(
                epoch=state.epoch,
                seq=observation.seq,
                step=observation.step,
                rule=rule.name,
                rung=0,
                reason="calm for as long as its limit looks back",
            )


def _audit(state: State, table: ArmedTable, observation: Observation) -> None:
    """Count a verdict that is not what the table it names says: the proof that both sides agree."""
    if table.seq != observation.verdict.table_seq or observation.seq != table.seq + 1:
        return
    if state.revised:  # the job may have judged by the table before or after the ack
        return
    seen = state.seen(observation)
    verdict = judge(
        table,
        observation.values,
        seen.vectors,
        seq=observation.seq,
        lr_factor=observation.lr_factor,
        spent={},
        declared=observation.declared,
    )
    if verdict != observation.verdict:
        state.counts["verdict_mismatch",] += 1


def _outcomes(state: State, observation: Observation) -> Iterator[Record]:
    """Close the interventions whose outcome is known now."""
    applied = observation.verdict.kind is not VerdictKind.VETO
    loss = observation.values.get("loss") if applied else None
    watching = []
    for watch in state.watches:
        outcome = watch.saw(loss, state.tick)
        if outcome is Outcome.PENDING:
            watching.append(watch)
            continue
        yield counted(
            state,
            replace(watch.intervention, outcome=outcome, outcome_seq=observation.seq),
        )
        rule = state.rule(watch.intervention.rule)
        if (
            rule is not None
            and outcome is Outcome.NOT_RECOVERED
            and state.rules[rule.name].rung == watch.rung
        ):
            yield from climb(state, observation, rule, "no recovery by recover_within")
    state.watches = watching


def _graded(state: State, observation: Observation) -> Iterator[Record]:
    """Yield the episodes that ended with this step."""
    ended = state.grader.saw(
        observation.step,
        observation.values,
        vetoed=observation.verdict.kind is VerdictKind.VETO,
        declared=bool(observation.declared),
    )
    for episode in ended:
        state.counts["episode", episode.kind] += 1
        yield Graded(epoch=state.epoch, seq=observation.seq, episode=episode)


def _track(state: State, observation: Observation, seen: Seen, *, healthy: bool) -> None:
    """Count on which steps the conditions of counters held."""
    for condition, (holds, uses) in state.program.tracked.items():
        held = healthy and state.known(uses) and is_true(holds, seen)
        state.held[condition].push(observation.step, held=held)


Flags = dict[SeriesKey, frozenset[int]]
"""Series to the positions in it whose values must stay out of the past."""


def _flags(state: State, seen: Seen, matched: list[Rule]) -> Flags:
    """Return what the rules that match keep out: values of signals compared with their past."""
    flags: Flags = {}
    for rule in matched:
        places = evidence.matched_places(state.program.predicates[rule.name], seen)
        for key in state.program.flags[rule.name]:
            name, each, _ = key
            found = frozenset({0})
            if each:
                found = places["dataset" if name == DATASET_LOSS else "layer"]
            flags[key] = flags.get(key, frozenset()) | found
    return flags


def _learn(
    state: State, observation: Observation, seen: Seen, flags: Flags, *, out: bool
) -> Iterator[Record]:
    """Let values into the past, or keep them out; accept a new level that lasts."""
    state.remember_late(seen)
    rebaseline = state.policy.rebaseline_steps
    for key, found in state.series.items():
        name, each, log = key
        values = seen.vectors.get(name, ()) if each else (seen.values.get(name),)
        flagged = flags.get(key, frozenset())
        for place, value in enumerate(values):
            if value is None or (each and value != value):  # noqa: PLR0124  NaN: absent
                continue
            if found[place].offer(
                observation.step, value, flagged=out or place in flagged, rebaseline=rebaseline
            ):
                state.counts["rebaseline",] += 1
                yield Rebaselined(
                    epoch=state.epoch,
                    seq=observation.seq,
                    step=observation.step,
                    signal=_series_name(state, key, place) + (" (log)" if log else ""),
                    flagged_steps=rebaseline,
                )


def _series_name(state: State, key: SeriesKey, place: int) -> str:
    name, each, _ = key
    if not each:
        return name
    groups = datasets(state.layout.signals) if name == DATASET_LOSS else state.layout.layer_groups
    return f"{name}[{groups[place]}]"
