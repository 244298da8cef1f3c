"""Engine values to protobuf messages and back: the one translator, used by agent and controller."""

from collections.abc import Sequence

from trimtab.controller.engine.expression import (
    Constant,
    Node,
    Operation,
    Operator,
    Signal,
)
from trimtab.controller.engine.model import (
    Ack,
    Action,
    ArmedRule,
    ArmedTable,
    Directive,
    Observation,
    Outcome,
    Verdict,
    VerdictKind,
)
from trimtab.protos import trimtab_pb2 as pb

PROTOCOL_VERSION = 1
"""Sent on registration; agent and controller of different versions do not work together."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest message either side takes."""

_VERDICT_TO_PB = {
    VerdictKind.APPLY: pb.Verdict.APPLY,
    VerdictKind.VETO: pb.Verdict.VETO,
}
_VERDICT_FROM_PB = {number: kind for kind, number in _VERDICT_TO_PB.items()}


def pb_from_verdict(verdict: Verdict) -> pb.Verdict:
    """Return the message."""
    return pb.Verdict(
        kind=_VERDICT_TO_PB[verdict.kind], rule=verdict.rule, table_seq=verdict.table_seq
    )


def verdict_from_pb(message: pb.Verdict) -> Verdict:
    """Return the verdict.

    Raises:
        ValueError: If its kind is none that this trimtab knows.
    """
    if message.kind not in _VERDICT_FROM_PB:
        raise ValueError(f"unknown kind of verdict {message.kind}")
    return Verdict(
        kind=_VERDICT_FROM_PB[message.kind], rule=message.rule, table_seq=message.table_seq
    )


def pb_from_observation(observation: Observation, layout: Sequence[str]) -> pb.Observation:
    """Return the message; `layout` names the signals in the order of `values`."""
    values = observation.values
    message = pb.Observation(
        seq=observation.seq,
        step=observation.step,
        values=[values.get(signal, 0.0) for signal in layout],
        absent=[at for at, signal in enumerate(layout) if signal not in values],
        verdict=pb_from_verdict(observation.verdict),
        lr_factor=observation.lr_factor,
    )
    if observation.batch is not None:
        message.batch = observation.batch
    return message


def observation_from_pb(message: pb.Observation, layout: Sequence[str]) -> Observation:
    """Return the observation.

    Raises:
        ValueError: If it does not fit the registered layout.
    """
    if len(message.values) != len(layout):
        raise ValueError(f"{len(message.values)} values, {len(layout)} signals were registered")
    absent = set(message.absent)
    return Observation(
        seq=message.seq,
        step=message.step,
        values={
            signal: value
            for at, (signal, value) in enumerate(zip(layout, message.values, strict=True))
            if at not in absent
        },
        verdict=verdict_from_pb(message.verdict),
        lr_factor=message.lr_factor,
        batch=message.batch if message.HasField("batch") else None,
    )


def pb_from_table(table: ArmedTable, durable_seq: int) -> pb.Table:
    """Return the message that also tells up to where the journal has the observations."""
    return pb.Table(
        epoch=table.epoch,
        seq=table.seq,
        expires_seq=table.expires_seq,
        lr_factor=table.lr_factor,
        budget=table.budget,
        rules=[
            pb.ArmedRule(name=r.name, predicate=pb_from_node(r.predicate), budget=r.budget)
            for r in table.rules
        ],
        policy_version=table.policy_version,
        durable_seq=durable_seq,
    )


def table_from_pb(message: pb.Table) -> ArmedTable:
    """Return the armed table.

    Raises:
        ValueError: If a predicate is not one.
    """
    return ArmedTable(
        epoch=message.epoch,
        seq=message.seq,
        expires_seq=message.expires_seq,
        lr_factor=message.lr_factor,
        budget=message.budget,
        rules=tuple(
            ArmedRule(name=r.name, predicate=node_from_pb(r.predicate), budget=r.budget)
            for r in message.rules
        ),
        policy_version=message.policy_version,
    )


def pb_from_node(node: Node) -> pb.Node:
    """Return the message of a folded tree.

    Raises:
        TypeError: If the tree is not folded.
    """
    match node:
        case Constant(value=value):
            return pb.Node(constant=value)
        case Signal(name=name):
            return pb.Node(signal=name)
        case Operation(operator=operator, operands=operands):
            parts = [pb_from_node(operand) for operand in operands]
            return pb.Node(operation=pb.Operation(operator=operator, operands=parts))
    raise TypeError(f"{node} is not folded")


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
