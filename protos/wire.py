"""Engine values to protobuf messages and back: the one translator, used by agent and controller."""

import math
from collections.abc import Sequence

from trimtab.controller.engine.expression import (
    Constant,
    Node,
    Operation,
    Operator,
    Signal,
    Term,
    Value,
)
from trimtab.controller.engine.model import (
    Ack,
    Action,
    Armed,
    ArmedTable,
    Change,
    Directive,
    Layout,
    Observation,
    Outcome,
    RankSample,
    Residual,
    Verdict,
    VerdictKind,
)
from trimtab.protos import trimtab_pb2 as pb

PROTOCOL_VERSION = 3
"""Sent on registration; agent and controller of different versions do not work together."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest message either side takes."""

_VERDICT_TO_PB = {
    VerdictKind.APPLY: pb.Verdict.APPLY,
    VerdictKind.VETO: pb.Verdict.VETO,
    VerdictKind.SCALE: pb.Verdict.SCALE,
}
_VERDICT_FROM_PB = {number: kind for kind, number in _VERDICT_TO_PB.items()}


def pb_from_verdict(verdict: Verdict) -> pb.Verdict:
    """Return the message."""
    return pb.Verdict(
        kind=_VERDICT_TO_PB[verdict.kind],
        rule=verdict.rule,
        table_seq=verdict.table_seq,
        scale=verdict.scale,
    )


def verdict_from_pb(message: pb.Verdict) -> Verdict:
    """Return the verdict.

    Raises:
        ValueError: If its kind is none that this trimtab knows.
    """
    if message.kind not in _VERDICT_FROM_PB:
        raise ValueError(f"unknown kind of verdict {message.kind}")
    return Verdict(
        kind=_VERDICT_FROM_PB[message.kind],
        rule=message.rule,
        table_seq=message.table_seq,
        scale=message.scale,
    )


def pb_from_observation(observation: Observation, layout: Layout) -> pb.Observation:
    """Return the message; `layout` is what the job registered."""
    values, vectors = observation.values, observation.vectors
    message = pb.Observation(
        seq=observation.seq,
        step=observation.step,
        values=[values.get(signal, 0.0) for signal in layout.signals],
        absent=[at for at, signal in enumerate(layout.signals) if signal not in values],
        verdict=pb_from_verdict(observation.verdict),
        lr_factor=observation.lr_factor,
        declared=observation.declared,
        ratio_sketch=observation.ratio_sketch,
    )
    if vectors:
        absent = (math.nan,) * len(layout.layer_groups)
        for signal in layout.layer_signals:
            message.layer_values.extend(vectors.get(signal, absent))
    if observation.batch is not None:
        message.batch = observation.batch
    return message


def observation_from_pb(message: pb.Observation, layout: Layout) -> Observation:
    """Return the observation.

    Raises:
        ValueError: If it does not fit the registered layout.
    """
    signals, groups = layout.signals, len(layout.layer_groups)
    if len(message.values) != len(signals):
        raise ValueError(f"{len(message.values)} values, {len(signals)} signals were registered")
    absent = set(message.absent)
    return Observation(
        seq=message.seq,
        step=message.step,
        values={
            signal: value
            for at, (signal, value) in enumerate(zip(signals, message.values, strict=True))
            if at not in absent
        },
        vectors=_vectors(tuple(message.layer_values), layout.layer_signals, groups),
        verdict=verdict_from_pb(message.verdict),
        lr_factor=message.lr_factor,
        declared=tuple(Change(name) for name in message.declared),
        batch=message.batch if message.HasField("batch") else None,
        ratio_sketch=tuple(message.ratio_sketch),
    )


def _vectors(
    values: tuple[float, ...], signals: Sequence[str], groups: int
) -> dict[str, tuple[float, ...]]:
    if not values:
        return {}
    if len(values) != len(signals) * groups:
        raise ValueError(
            f"{len(values)} layer values, {len(signals)} signals of {groups} layer groups were"
            " registered"
        )
    parts = {signal: values[at * groups : (at + 1) * groups] for at, signal in enumerate(signals)}
    return {signal: part for signal, part in parts.items() if not all(map(math.isnan, part))}


def pb_from_table(table: ArmedTable, durable_seq: int, *, with_residuals: bool) -> pb.Table:
    """Return the message that also tells up to where the journal has the observations.

    The residuals are needed once: in the first table of a stream, and when the policy changed.
    """
    terms: list[float] = []
    sizes: list[int] = []
    for term in table.terms:
        if isinstance(term, tuple):
            terms.extend(term)
            sizes.append(len(term) + 1)
        else:
            terms.append(math.nan if term is None else term)
            sizes.append(0)
    return pb.Table(
        epoch=table.epoch,
        seq=table.seq,
        expires_seq=table.expires_seq,
        lr_factor=table.lr_factor,
        budget=table.budget,
        policy_version=table.policy_version,
        durable_seq=durable_seq,
        residuals=map(_pb_from_residual, table.residuals) if with_residuals else (),
        armed=[pb.Armed(residual=a.residual, budget=a.budget) for a in table.armed],
        terms=terms,
        term_sizes=sizes,
        cause_budgets=table.cause_budgets,
    )


def table_from_pb(message: pb.Table, before: ArmedTable | None) -> ArmedTable:
    """Return the armed table; residuals that are not in the message are those of the one before.

    Raises:
        ValueError: If a predicate is not one, or the residuals of the policy never came.
    """
    residuals = tuple(map(_residual_from_pb, message.residuals))
    if not residuals and before is not None and before.policy_version == message.policy_version:
        residuals = before.residuals
    if any(armed.residual >= len(residuals) for armed in message.armed):
        raise ValueError(f"the residuals of policy {message.policy_version} did not come")
    return ArmedTable(
        epoch=message.epoch,
        seq=message.seq,
        expires_seq=message.expires_seq,
        lr_factor=message.lr_factor,
        policy_version=message.policy_version,
        residuals=residuals,
        terms=_terms(message),
        armed=tuple(Armed(residual=a.residual, budget=a.budget) for a in message.armed),
        budget=message.budget,
        cause_budgets=dict(message.cause_budgets),
    )


def _terms(message: pb.Table) -> tuple[Value | None, ...]:
    values, at = list(message.terms), 0
    terms: list[Value | None] = []
    for size in message.term_sizes:
        if size:
            terms.append(tuple(values[at : at + size - 1]))
            at += size - 1
        else:
            terms.append(None if math.isnan(values[at]) else values[at])
            at += 1
    return tuple(terms)


def _pb_from_residual(residual: Residual) -> pb.Residual:
    message = pb.Residual(
        rule=residual.rule,
        predicate=pb_from_node(residual.predicate),
        cause=residual.cause,
        paused_by=residual.paused_by,
        fresh=residual.fresh,
    )
    if residual.clip_to is not None:
        message.clip_to.CopyFrom(pb_from_node(residual.clip_to))
    return message


def _residual_from_pb(message: pb.Residual) -> Residual:
    return Residual(
        rule=message.rule,
        predicate=node_from_pb(message.predicate),
        clip_to=node_from_pb(message.clip_to) if message.HasField("clip_to") else None,
        cause=message.cause,
        paused_by=tuple(Change(name) for name in message.paused_by),
        fresh=message.fresh,
    )


def pb_from_node(node: Node) -> pb.Node:
    """Return the message of a predicate's tree.

    Raises:
        TypeError: If a part of the past is still in it.
    """
    match node:
        case Constant(value=value):
            return pb.Node(constant=value)
        case Signal(name=name, each=each):
            return pb.Node(each_signal=name) if each else pb.Node(signal=name)
        case Term(index=index, each=each):
            return pb.Node(each_term=index) if each else pb.Node(term=index)
        case Operation(operator=operator, operands=operands):
            parts = [pb_from_node(operand) for operand in operands]
            return pb.Node(operation=pb.Operation(operator=operator, operands=parts))
    raise TypeError(f"{node} is not split into terms and a predicate")


def node_from_pb(message: pb.Node) -> Node:
    """Return the tree.

    Raises:
        ValueError: If a node is empty or an operator unknown.
    """
    match message.WhichOneof("node"):
        case "constant":
            return Constant(message.constant)
        case "signal":
            return Signal(message.signal)
        case "each_signal":
            return Signal(message.each_signal, each=True)
        case "term":
            return Term(message.term)
        case "each_term":
            return Term(message.each_term, each=True)
        case "operation":
            operation = message.operation
            operands = tuple(node_from_pb(operand) for operand in operation.operands)
            return Operation(Operator(operation.operator), operands)
    raise ValueError("an empty node in a predicate")


def pb_from_directive(directive: Directive) -> pb.Directive:
    """Return the message."""
    return pb.Directive(
        id=directive.id,
        epoch=directive.epoch,
        seq=directive.seq,
        step=directive.step,
        expires_seq=directive.expires_seq,
        rule=directive.rule,
        action=directive.action,
        arguments=dict(directive.arguments),
        options=dict(directive.options),
    )


def directive_from_pb(message: pb.Directive) -> Directive:
    """Return the directive.

    Raises:
        ValueError: If this trimtab does not know the action.
    """
    return Directive(
        id=message.id,
        epoch=message.epoch,
        seq=message.seq,
        step=message.step,
        expires_seq=message.expires_seq,
        rule=message.rule,
        action=Action(message.action),
        arguments=dict(message.arguments),
        options=dict(message.options),
    )


def pb_from_ack(ack: Ack) -> pb.Ack:
    """Return the message."""
    return pb.Ack(
        id=ack.id,
        epoch=ack.epoch,
        seq=ack.seq,
        step=ack.step,
        outcome=ack.outcome,
        detail=ack.detail,
    )


def pb_from_rank_sample(sample: RankSample) -> pb.RankSample:
    """Return the message."""
    return pb.RankSample(
        seq=sample.seq,
        step=sample.step,
        loss=sample.loss,
        step_time_s=sample.step_time_s,
        memory_bytes=sample.memory_bytes,
        nonfinite=sample.nonfinite,
        batch_ids=sample.batch_ids,
        dataset=sample.dataset,
    )


def rank_sample_from_pb(message: pb.RankSample) -> RankSample:
    """Return the sample."""
    return RankSample(
        seq=message.seq,
        step=message.step,
        loss=message.loss if message.HasField("loss") else None,
        step_time_s=message.step_time_s,
        memory_bytes=message.memory_bytes,
        nonfinite=message.nonfinite,
        batch_ids=tuple(message.batch_ids),
        dataset=message.dataset,
    )


def ack_from_pb(message: pb.Ack) -> Ack:
    """Return the ack.

    Raises:
        ValueError: If the outcome is none.
    """
    return Ack(
        id=message.id,
        epoch=message.epoch,
        seq=message.seq,
        step=message.step,
        outcome=Outcome(message.outcome),
        detail=message.detail,
    )
