"""What a decision shows for itself: the two sides of each comparison, the layers, what was close.

Called by the arbiter when a rule decides, so it need not be fast.
"""

import math
from collections.abc import Iterator
from typing import Any

from trimtab.controller.engine.expression import (
    COMPARISONS,
    OVER_LAYERS,
    Constant,
    Node,
    Operation,
    Operator,
    Seen,
    compiled,
    is_each,
    signals,
)
from trimtab.controller.engine.model import Observation
from trimtab.controller.engine.program import comparisons
from trimtab.controller.engine.signals import DATASET_LOSS, datasets
from trimtab.controller.engine.state import State

CLOSE = 0.9
"""A rule is close when the weakest of the parts it needs is at least this share of its bound."""


def matched_places(predicate: Node, seen: Seen) -> dict[str, frozenset[int]]:
    """Return "layer" and "dataset" to the positions that matched inside any_layer and its like."""
    found: dict[str, frozenset[int]] = {"layer": frozenset(), "dataset": frozenset()}
    for part in _over(predicate):
        held = _value(part.operands[0], seen)
        if held is not None:
            places = frozenset(at for at, true in enumerate(held) if true)
            found[_axis(part)] |= places
    return found


def names(state: State, places: dict[str, frozenset[int]]) -> tuple[str, ...]:
    """Return the names of matched layer groups and datasets."""
    known = datasets(state.layout.signals)
    layers = [state.layout.layer_groups[at] for at in sorted(places["layer"])]
    return (*layers, *(known[at] for at in sorted(places["dataset"])))


def lines(state: State, predicate: Node, seen: Seen) -> tuple[str, ...]:
    """Return one line per comparison: both sides as spelled, with their values.

    A comparison per layer group is shown for the first that matched.
    """
    places = matched_places(predicate, seen)
    found = []
    for part in comparisons(predicate):
        place: tuple[int, str] | None = None
        if is_each(part):
            axis = "dataset" if _over_datasets(part) else "layer"
            if not places[axis]:
                continue
            at = min(places[axis])
            groups = (
                datasets(state.layout.signals) if axis == "dataset" else state.layout.layer_groups
            )
            place = (at, groups[at])
        left, right = (
            _side(text, operand, seen, place)
            for text, operand in zip(part.text, part.operands, strict=True)
        )
        found.append(f"{left} {part.operator} {right}" + (f" in {place[1]}" if place else ""))
    return tuple(found)


def close(state: State, observation: Observation, deciding: str) -> tuple[str, ...]:
    """Return the rules that nearly matched this step, with the weakest part over its bound."""
    seen = state.seen(observation)
    found = []
    for rule in state.policy.rules:
        if rule.name == deciding or rule.name in state.inactive:
            continue
        nearness = _nearness(state.program.predicates[rule.name], seen)
        if nearness is not None and CLOSE <= nearness < 1:
            found.append(f"{rule.name} at {nearness:.2f} of its bound")
    return tuple(found)


def _side(text: str, operand: Node, seen: Seen, place: tuple[int, str] | None) -> str:
    if isinstance(operand, Constant):
        return text
    value = _value(operand, seen)
    if place is not None and isinstance(value, tuple):
        value = value[place[0]]
    return f"{text} = unknown" if value is None else f"{text} = {value:.6g}"


def _value(node: Node, seen: Seen) -> Any:
    try:
        return compiled(node)(seen)
    except (KeyError, TypeError, StopIteration):  # absent, or a term that is not known
        return None


def _over(node: Node) -> Iterator[Operation]:
    if isinstance(node, Operation):
        if node.operator in OVER_LAYERS:
            yield node
        for operand in node.operands:
            yield from _over(operand)


def _axis(part: Operation) -> str:
    return "dataset" if _over_datasets(part) else "layer"


def _over_datasets(node: Node) -> bool:
    return any(signal.name == DATASET_LOSS and signal.each for signal in signals(node))


def _nearness(node: Node, seen: Seen) -> float | None:
    """Return how much of its bound a condition reaches; None where that means nothing."""
    if not isinstance(node, Operation):
        return None
    if node.operator in COMPARISONS:
        return _share(node, seen)
    parts = [_nearness(operand, seen) for operand in node.operands]
    known = [part for part in parts if part is not None]
    if not known or node.operator is Operator.NOT:
        return None
    return max(known) if node.operator is Operator.OR else min(known)


def _share(node: Operation, seen: Seen) -> float | None:
    left, right = (_value(operand, seen) for operand in node.operands)
    if not (isinstance(left, float) and isinstance(right, float)):
        return None
    if node.operator in (Operator.LT, Operator.LE):
        left, right = right, left
    if not (left >= 0 and right > 0 and math.isfinite(left / right)):
        return None
    return left / right
