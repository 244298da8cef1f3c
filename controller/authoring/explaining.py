"""A policy in plain words: what each rule will do, when, and which signals it needs.

Called by `trimtab policy explain`, and by `describing` for the page of a policy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from trimtab.controller.actions import ACTIONS
from trimtab.controller.engine.expression import Constant, Node, Signal, signals
from trimtab.controller.engine.model import ARMED_ACTIONS, Action, Layout
from trimtab.controller.engine.policy import ActionCall, Policy, Rule
from trimtab.controller.engine.program import missing, needed
from trimtab.controller.engine.signals import SIGNALS


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One rule in plain words."""

    rule: str
    mode: str
    when: str
    does: tuple[str, ...]
    limits: tuple[str, ...]
    signals: tuple[str, ...]
    notes: tuple[str, ...]
    """What one may not expect: late signals, actions by directive, absent signals."""


def explain(policy: Policy, layout: Layout | None = None) -> Iterator[Explanation]:
    """Yield every rule in plain words.

    Args:
        policy: The policy.
        layout: What a job measures: rules that need something else are said to be inactive.
    """
    for rule in policy.rules:
        yield Explanation(
            rule=rule.name,
            mode=rule.mode,
            when=rule.text + (f", {rule.for_steps} steps in a row" if rule.for_steps > 1 else ""),
            does=tuple(_does(rule)),
            limits=tuple(_limits(policy, rule)),
            signals=tuple(sorted(_spelled(signal) for signal in needed(rule))),
            notes=tuple(_notes(policy, rule, layout)),
        )


def _does(rule: Rule) -> Iterator[str]:
    for place, rung in enumerate(rule.rungs):
        what = " and ".join(_spelled_call(call) for call in rung.do)
        if place == 0:
            yield f"{what}, at most {rung.limit}"
        else:
            yield f"if that does not help: {what}, at most {rung.limit}"
    if len(rule.rungs) > 1:
        yield "if that does not help either: an alert, and no more of this rule (structural)"


def _spelled_call(call: ActionCall) -> str:
    said = {name: f"{n.value:g}" for name, n in call.arguments.items() if _worth_saying(n)}
    said |= call.options
    said |= call.texts
    return call.action + (f" ({', '.join(f'{k}: {v}' for k, v in said.items())})" if said else "")


def _worth_saying(node: Node) -> TypeGuard[Constant]:
    return isinstance(node, Constant) and node.value != 0


def _limits(policy: Policy, rule: Rule) -> Iterator[str]:
    yield f"active from step {rule.after_steps} of the run on"
    if rule.cooldown_steps:
        yield f"no other decision for {rule.cooldown_steps} steps after one"
    for change, steps in sorted(rule.hold_off.items()):
        yield f"silent for {steps} steps after {change}"
    if rule.layers:
        yield f"looks at the layer groups {', '.join(rule.layers)}"
    if rule.acts:
        yield f"counts against the run's limit of {policy.run_limit}"
        if rule.cause in policy.cause_limits:
            limit = policy.cause_limits[rule.cause]
            yield f"counts against the limit of cause {rule.cause}, {limit}"


def _notes(policy: Policy, rule: Rule, layout: Layout | None) -> Iterator[str]:
    if not rule.acts:
        yield "only observes: decisions are written down and nothing is done"
    elif any(call.action in ARMED_ACTIONS for call in rule.rungs[0].do):
        yield "armed: the job judges the pending step by itself, before the update is applied"
    if rule.acts and any(_is_directive(call) for rung in rule.rungs for call in rung.do):
        yield "directives are journalled first and carried out between two steps, by all ranks"
    late = sorted({s.name for s in signals(rule.when) if s.late})
    if late:
        own = [name for name in late if name in policy.own_signals]
        why = "user-defined" if own == late else "known only after the step"
        yield (
            f"acts a step later on {', '.join(late)} ({why}): the pending step is judged by the"
            " value of the step before"
        )
    if layout is not None and (absent := missing(rule, layout)):
        yield f"INACTIVE: the job does not measure {', '.join(sorted(absent))}"


def _is_directive(call: ActionCall) -> bool:
    return call.action not in ARMED_ACTIONS and call.action is not Action.ALERT


def _spelled(signal: Signal) -> str:
    return signal.name + (" per layer group" if signal.each and signal.name in SIGNALS else "")


def action_meanings(policy: Policy) -> dict[str, str]:
    """Return the actions that a policy uses and what they do."""
    used = {call.action for _, _, call in policy.calls()}
    return {action.value: info.meaning for action, info in ACTIONS.items() if action in used}
