"""What an armed table says of a pending step.  The agent acts on it, the engine audits it."""

import math
from collections.abc import Collection, Iterable, Mapping

from trimtab.controller.engine.expression import Evaluate, Seen
from trimtab.controller.engine.model import (
    NO_TABLE,
    REFLEX,
    ArmedTable,
    Change,
    Residual,
    Verdict,
    VerdictKind,
)


def finite(values: Iterable[float]) -> bool:
    """Return whether no value is NaN or infinite."""
    return all(map(math.isfinite, values))


def judge(
    table: ArmedTable | None,
    values: Mapping[str, float],
    vectors: Mapping[str, tuple[float, ...]],
    *,
    seq: int,
    lr_factor: float,
    spent: Mapping[str, int],
    declared: Collection[Change] = (),
) -> Verdict:
    """Return the verdict on a pending step.  First the reflex, then the table's rules in order.

    Args:
        table: The newest table, or None.  One that has expired counts as none.
        values: Signals of the pending step.
        vectors: Signals per layer group (dataset_loss: per dataset) of the pending step.
        seq: Of the pending step.
        lr_factor: The factor that the pending update was scaled with.
        spent: Verdicts other than apply that were given after the table's step, by rule.
        declared: Changes that the job declared since the table's step.
    """
    if table is not None and seq > table.expires_seq:
        table = None
    table_seq = NO_TABLE if table is None else table.seq
    if not finite(values.values()):
        return Verdict(kind=VerdictKind.VETO, rule=REFLEX, table_seq=table_seq)
    if table is None or sum(spent.values()) >= table.budget:
        return Verdict(table_seq=table_seq)
    seen = Seen(values=values, vectors=vectors, terms=table.terms)
    late = seq > table.seq + 1
    for armed in table.armed:
        residual = table.residuals[armed.residual]
        if (
            spent.get(residual.rule, 0) >= armed.budget
            or (late and residual.fresh)
            or not set(declared).isdisjoint(residual.paused_by)
            or _cause_spent(table, residual, spent)
        ):
            continue
        if residual.scaled_by_lr and lr_factor != table.lr_factor:
            continue
        if is_true(residual.holds, seen):
            return _verdict(residual, seen, table_seq)
    return Verdict(table_seq=table_seq)


def is_true(holds: Evaluate, seen: Seen) -> bool:
    """Return whether a predicate holds of a pending step; False when a signal is absent."""
    try:
        return bool(holds(seen))
    except KeyError:
        return False


def _verdict(residual: Residual, seen: Seen, table_seq: int) -> Verdict:
    if residual.allowed is None:
        return Verdict(kind=VerdictKind.VETO, rule=residual.rule, table_seq=table_seq)
    scale = scale_to(residual.allowed, seen)
    if not 0.0 < scale < 1.0:
        return Verdict(table_seq=table_seq)
    return Verdict(kind=VerdictKind.SCALE, rule=residual.rule, scale=scale, table_seq=table_seq)


def scale_to(allowed_norm: Evaluate, seen: Seen) -> float:
    """Return what the pending update is multiplied with to reach a norm; 1 if it is below it.

    NaN where the norm is not known or not positive: nothing is clipped then.
    """
    try:
        norm, allowed = float(seen.values["update_norm"]), float(allowed_norm(seen))
    except (KeyError, TypeError):  # TypeError: a term that is not known
        return math.nan
    if not (0.0 < allowed < math.inf and norm > 0.0):
        return math.nan
    return min(1.0, allowed / norm)


def _cause_spent(table: ArmedTable, residual: Residual, spent: Mapping[str, int]) -> bool:
    if residual.cause not in table.cause_budgets:
        return False
    causes = {residual.rule: residual.cause for residual in table.residuals}
    given = sum(n for rule, n in spent.items() if causes.get(rule) == residual.cause)
    return given >= table.cause_budgets[residual.cause]
