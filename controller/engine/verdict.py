"""What an armed table says of a pending step.  The agent acts on it, the engine audits it."""

import math
from collections.abc import Iterable, Mapping

from trimtab.controller.engine.expression import Node, evaluate, signals
from trimtab.controller.engine.model import (
    NO_TABLE,
    REFLEX,
    ArmedRule,
    ArmedTable,
    Verdict,
    VerdictKind,
)
from trimtab.controller.engine.signals import SCALED_BY_LR


def finite(values: Iterable[float]) -> bool:
    """Return whether no value is NaN or infinite."""
    return all(math.isfinite(value) for value in values)


def judge(
    table: ArmedTable | None,
    values: Mapping[str, float],
    *,
    seq: int,
    lr_factor: float,
    spent: Mapping[str, int],
) -> Verdict:
    """Return the verdict on a pending step.  First the reflex, then the table's rules in order.

    Args:
        table: The newest table, or None.  One that has expired counts as none.
        values: Signals of the pending step.
        seq: Of the pending step.
        lr_factor: The factor that the pending update was scaled with.
        spent: Vetoes that this table has already given, by rule.
    """
    if table is not None and seq > table.expires_seq:
        table = None
    table_seq = NO_TABLE if table is None else table.seq
    if not finite(values.values()):
        return Verdict(kind=VerdictKind.VETO, rule=REFLEX, table_seq=table_seq)
    if table is not None and sum(spent.values()) < table.budget:
        for rule in table.rules:
            if spent.get(rule.name, 0) < rule.budget and holds(rule, table, values, lr_factor):
                return Verdict(kind=VerdictKind.VETO, rule=rule.name, table_seq=table_seq)
    return Verdict(table_seq=table_seq)


def holds(
    rule: ArmedRule, table: ArmedTable, values: Mapping[str, float], lr_factor: float
) -> bool:
    """Return whether an armed rule's predicate is true of the pending step."""
    if lr_factor != table.lr_factor and signals(rule.predicate) & SCALED_BY_LR:
        return False
    return is_true(rule.predicate, values)


def is_true(residual: Node, values: Mapping[str, float]) -> bool:
    """Return whether a residual holds of a pending step; False when it lacks a signal."""
    try:
        return bool(evaluate(residual, values))
    except KeyError:
        return False
