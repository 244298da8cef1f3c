"""From rules that match to decisions: who acts, on what evidence, with what arguments.

Called by engine.step once per observation.  At most one directive is on its way at a time; of the
rules that would veto or clip a step, the first in the policy's order does.
"""

import math
from collections.abc import Iterator, Mapping

from trimtab.controller.engine import evidence
from trimtab.controller.engine.expression import Seen
from trimtab.controller.engine.model import (
    ARMED_ACTIONS,
    LR_FACTOR_FLOOR,
    REFLEX,
    Action,
    Change,
    Climbed,
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

STRUCTURAL = "structural: the ladder is spent, this rule stops intervening; a person must look"


def decide(state: State, observation: Observation, seen: Seen) -> Iterator[Record]:
    """Yield what follows from the verdict that was given and the rules that match, in order."""
    verdict = observation.verdict
    stopped = verdict.rule if verdict.kind is not VerdictKind.APPLY else ""
    if stopped and state.rule(stopped) is None:
        yield from _by_no_rule(state, observation, stopped)
    if state.nonfinite_in_row == state.policy.rebaseline_steps:
        yield _alert(
            state,
            observation,
            REFLEX,
            f"{state.nonfinite_in_row} steps in a row were not finite: structural, skipping them"
            " does not help",
        )
    for rule in state.policy.rules:
        yield from _rule_decides(state, observation, seen, rule, stopped=stopped)


def _rule_decides(
    state: State, observation: Observation, seen: Seen, rule: Rule, *, stopped: str
) -> Iterator[Record]:
    memory = state.rules[rule.name]
    due = memory.due(rule, state.tick)
    if due and memory.at(rule) is not None and memory.budget(rule) == 0:
        yield from climb(state, observation, rule, "its limit is spent")
    rung = memory.at(rule)
    fires = due and rung is not None and memory.budget(rule) > 0
    if fires and rule.acts and not _affordable(state, rule):
        state.counts["over_budget", rule.name] += 1
        fires = False
    if rung is None or not (fires or rule.name == stopped):
        return
    made: list[Record] = []
    for call in rung.do:
        if call.action in ARMED_ACTIONS and rule.acts:
            made += _armed(state, observation, seen, rule, call, stopped=stopped)
        elif fires:
            made += _act(state, observation, seen, rule, call)
    if made:
        memory.decide(rule, state.tick)
        if rule.acts:
            state.acted.append((state.tick, rule.cause))
    yield from made


def climb(state: State, observation: Observation, rule: Rule, reason: str) -> Iterator[Record]:
    """Move a rule's ladder up, and say so; past its end the rule stops, with an alert."""
    if len(rule.rungs) == 1:
        return
    memory = state.rules[rule.name]
    memory.climb(state.tick)
    state.counts["climb", rule.name] += 1
    yield Climbed(
        epoch=state.epoch,
        seq=observation.seq,
        step=observation.step,
        rule=rule.name,
        rung=memory.rung,
        reason=reason,
    )
    if memory.at(rule) is None:
        yield _alert(state, observation, rule.name, STRUCTURAL, rule)


def _affordable(state: State, rule: Rule) -> bool:
    """Return whether the run's budget and that of the rule's cause allow one more decision."""
    limits = state.policy.cause_limits
    of_cause = state.left(limits[rule.cause], rule.cause) if rule.cause in limits else 1
    return state.left(state.policy.run_limit) > 0 and of_cause > 0


def _alert(
    state: State, observation: Observation, name: str, line: str, rule: Rule | None = None
) -> Decision:
    return _decision(state, observation, name, ActionCall(action=Action.ALERT), (line,), rule=rule)


def _by_no_rule(state: State, observation: Observation, name: str) -> Iterator[Record]:
    """Write down a veto of the reflex, or a verdict of a rule that the policy no longer has."""
    lines = tuple(
        f"{signal} = {value}"
        for signal, value in observation.values.items()
        if not math.isfinite(value)
    )
    action = _action_of(observation)
    decision = _decision(state, observation, name, ActionCall(action=action), lines)
    yield decision
    yield watched(state, intervened(state, decision), REFLEX_RECOVER_WITHIN_STEPS)


def _action_of(observation: Observation) -> Action:
    scaled = observation.verdict.kind is VerdictKind.SCALE
    return Action.CLIP_UPDATE if scaled else Action.SKIP_BATCH


def _armed(
    state: State,
    observation: Observation,
    seen: Seen,
    rule: Rule,
    call: ActionCall,
    *,
    stopped: str,
) -> Iterator[Record]:
    """Write down what became of a rule's veto or clip: given, missed, or another rule's."""
    if stopped not in ("", rule.name) or (stopped and _action_of(observation) != call.action):
        return
    numbers = _numbers(state, call, seen)
    if not stopped and _needs_no_clip(call, observation, numbers):
        return
    if stopped and observation.verdict.kind is VerdictKind.SCALE:
        numbers = {**(numbers or {}), "scale": observation.verdict.scale}
    lines = evidence.lines(state, state.program.predicates[rule.name], seen)
    decision = _decision(
        state, observation, rule.name, call, lines, rule=rule, seen=seen, arguments=numbers
    )
    yield decision
    if stopped:
        yield watched(state, intervened(state, decision), rule.recover_within_steps, rule)
    else:
        yield intervened(state, decision, Outcome.MISSED, "no table in force held the rule")


def _needs_no_clip(
    call: ActionCall, observation: Observation, numbers: Mapping[str, float] | None
) -> bool:
    """Return whether the update is below the norm that it would be clipped to."""
    if call.action is not Action.CLIP_UPDATE or numbers is None:
        return False
    allowed = numbers["to"]
    return not 0.0 < allowed < observation.values.get("update_norm", 0.0)


def _act(
    state: State, observation: Observation, seen: Seen, rule: Rule, call: ActionCall
) -> Iterator[Record]:
    """Decide an action that the job does not take by itself."""
    directive = rule.acts and call.action is not Action.ALERT
    if directive and state.outstanding:  # one at a time: the job is between two states
        return
    numbers = _numbers(state, call, seen)
    refusal = _refusal(observation, call, numbers) if directive else ""
    if call.action is Action.ROLLBACK and numbers is not None:
        # Sound points lie `soak` clean steps before the onset, not before the alarm.
        onset = state.rules[rule.name].onset_step
        numbers["before_step"] = float(onset) - numbers.pop("soak")
    lines = evidence.lines(state, state.program.predicates[rule.name], seen)
    decision = _decision(
        state, observation, rule.name, call, lines, rule=rule, seen=seen, arguments=numbers
    )
    yield decision
    if refusal:
        yield intervened(state, decision, Outcome.REFUSED, refusal)
        yield from climb(state, observation, rule, f"{call.action} was refused")
    elif directive:
        state.outstanding[decision.id] = Directive(
            id=decision.id,
            epoch=state.epoch,
            seq=observation.seq,
            step=observation.step,
            expires_seq=observation.seq + state.policy.expires_steps,
            rule=rule.name,
            action=call.action,
            arguments=decision.arguments,
            options=decision.options,
        )


def _numbers(state: State, call: ActionCall, seen: Seen) -> dict[str, float] | None:
    """Return an action's arguments as numbers, or None when one is not known."""
    numbers = {}
    for name, (_, value, uses) in state.program.arguments[id(call)].items():
        if not state.known(uses):
            return None
        try:
            numbers[name] = float(value(seen))
        except KeyError:  # a signal is absent in this step
            return None
    return numbers


def _refusal(
    observation: Observation, call: ActionCall, numbers: Mapping[str, float] | None
) -> str:
    """Return why an action cannot be asked of the job, or an empty text."""
    if numbers is None:
        return "an argument is not known"
    if call.action is Action.SCALE_LR:
        by = numbers["by"]
        if not 0.0 < by <= 1.0:
            return f"the LR factor {by:g} is not in (0, 1]"
        product = observation.lr_factor * by
        if product < LR_FACTOR_FLOOR:
            return f"the LR factor would be {product:g}, least is {LR_FACTOR_FLOOR}"
    return ""


def _decision(
    state: State,
    observation: Observation,
    name: str,
    call: ActionCall,
    lines: tuple[str, ...],
    *,
    rule: Rule | None = None,
    seen: Seen | None = None,
    arguments: Mapping[str, float] | None = None,
) -> Decision:
    mode = rule.mode if rule else Mode.ACT
    state.counts["decision", name, call.action, mode] += 1
    layers: tuple[str, ...] = ()
    if rule is not None and seen is not None:
        places = evidence.matched_places(state.program.predicates[name], seen)
        layers = evidence.names(state, places)
    options = dict(call.options)
    if options.get("layers") == "matched":
        options["layers"] = ",".join(layers)
    return Decision(
        id=f"{state.epoch}-{observation.seq}-{name}-{call.action}",
        epoch=state.epoch,
        seq=observation.seq,
        step=observation.step,
        rule=name,
        action=call.action,
        mode=mode,
        arguments=arguments or {},
        options=options,
        evidence=lines,
        layers=layers,
        close=evidence.close(state, observation, name),
        rung=state.rules[name].rung if rule else 0,
        labels=rule.labels if rule else {},
        summary=rule.summary if rule else "",
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
    if outcome is Outcome.PENDING:
        state.changed[Change.INTERVENTION] = state.tick
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


def watched(
    state: State, intervention: Intervention, within_steps: int, rule: Rule | None = None
) -> Intervention:
    """Watch the loss after an intervention that was carried out."""
    state.watches.append(
        Watch(
            intervention=intervention,
            band=band(state.series["loss", False, False][0]),
            deadline=state.tick + within_steps,
            rung=state.rules[rule.name].rung if rule else 0,
        )
    )
    return intervention
