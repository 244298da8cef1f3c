"""A run's state as JSON-able values and back.  Called by the run actor and the journal's replay."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from trimtab.controller.engine.episode import Grader
from trimtab.controller.engine.model import (
    Action,
    Change,
    Directive,
    Intervention,
    Layout,
    Outcome,
)
from trimtab.controller.engine.outcome import Watch
from trimtab.controller.engine.policy import Policy
from trimtab.controller.engine.rule import RuleMemory
from trimtab.controller.engine.state import State

SNAPSHOT_VERSION = 2

_PLAIN = (
    "epoch", "seq", "step", "tick", "lr_factor", "values", "vetoes_in_row", "nonfinite_in_row",
    "revised",
)  # fmt: skip


def snapshot(state: State) -> dict[str, Any]:
    """Return the state as JSON-able values, without what the policy and the past determine."""
    return {
        "version": SNAPSHOT_VERSION,
        "policy_version": state.policy.version,
        **{name: getattr(state, name) for name in _PLAIN},
        "layout": asdict(state.layout),
        "late": [[name, each, *value] for (name, each), value in state.late.items()],
        "series": [
            [*key, [series.snapshot() for series in found]] for key, found in state.series.items()
        ],
        "held": [[repr(node), held.snapshot()] for node, held in state.held.items()],
        "rules": {name: asdict(memory) for name, memory in state.rules.items()},
        "changed": {str(change): tick for change, tick in state.changed.items()},
        "acted": [list(entry) for entry in state.acted],
        "watches": [asdict(watch) for watch in state.watches],
        "grader": state.grader.snapshot(),
        "outstanding": [asdict(directive) for directive in state.outstanding.values()],
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
    state.expect(Layout(**{name: tuple(names) for name, names in data["layout"].items()}))
    for name in _PLAIN:
        setattr(state, name, data[name])
    for name, each, tick, value in data["late"]:
        state.late[name, each] = (tick, tuple(value) if each else value)
    for name, each, log, saved in data["series"]:
        for series, past in zip(state.series.get((name, each, log), []), saved, strict=False):
            series.restore(past)
    pasts = dict(data["held"])
    for node, held in state.held.items():
        if repr(node) in pasts:
            held.restore(pasts[repr(node)])
    for name, memory in data["rules"].items():
        if name in state.rules:
            state.rules[name] = RuleMemory(**memory)
    state.changed = {Change(change): tick for change, tick in data["changed"].items()}
    state.acted = [(tick, cause) for tick, cause in data["acted"]]
    state.watches = [
        Watch(**(watch | {"intervention": _intervention(watch["intervention"])}))
        for watch in data["watches"]
    ]
    state.grader = Grader.restore(data["grader"])
    directives = (Directive(**(d | {"action": Action(d["action"])})) for d in data["outstanding"])
    state.outstanding = {directive.id: directive for directive in directives}
    state.counts = Counter({tuple(key): count for key, count in data["counts"]})
    state.rearm()
    return state


def adopt(state: State, policy: Policy) -> State:
    """Return the state under another policy: the past stays, rules of the same name go on.

    A ladder that was spent begins again: who changed the policy has looked.
    """
    adopted = restore(snapshot(state), policy)
    if policy.version != state.policy.version:
        for rule in policy.rules:
            memory = adopted.rules[rule.name]
            if memory.at(rule) is None:
                memory.rung, memory.decided = 0, []
        adopted.rearm()
    adopted.revised = True
    return adopted


def _intervention(data: dict[str, Any]) -> Intervention:
    return Intervention(
        **(data | {"action": Action(data["action"]), "outcome": Outcome(data["outcome"])})
    )
