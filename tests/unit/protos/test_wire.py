"""What goes over the line comes out as it went in."""

import math
from dataclasses import replace

import pytest

from trimtab.controller.engine.expression import Constant, Operation, Operator, Signal, Term
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
    Residual,
    Verdict,
    VerdictKind,
)
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import wire

LAYOUT = Layout(
    signals=("loss", "grad_norm", "lr"),
    layer_groups=("embed", "blocks.0"),
    layer_signals=("update_norm", "ratio_dip"),
)

TABLE = ArmedTable(
    epoch=2,
    seq=41,
    expires_seq=91,
    lr_factor=0.1,
    policy_version="abc",
    residuals=(
        Residual(
            rule="a",
            predicate=Operation(
                Operator.AND,
                (
                    Operation(Operator.GT, (Signal("loss"), Term(0))),
                    Operation(Operator.NOT, (Operation(Operator.FINITE, (Signal("lr"),)),)),
                ),
            ),
            cause="data",
            paused_by=(Change.BATCH_SIZE,),
            fresh=True,
        ),
        Residual(
            rule="b",
            predicate=Operation(
                Operator.ANY,
                (Operation(Operator.GT, (Signal("update_norm", each=True), Term(1, each=True))),),
            ),
            clip_to=Operation(Operator.MUL, (Constant(0.1), Term(0))),
        ),
    ),
    terms=(0.1 + 0.2, (1.5, 2.5), None, (), 7.0),
    armed=(Armed(residual=1, budget=3),),
    budget=16,
    cause_budgets={"data": 4},
)


def through(message: object) -> object:
    return type(message).FromString(message.SerializeToString())  # type: ignore[attr-defined]


def test_an_observation_keeps_absent_and_broken_values_apart() -> None:
    seen = Observation(
        seq=7,
        step=5,
        values={"loss": math.inf, "lr": 0.0},
        verdict=Verdict(kind=VerdictKind.VETO, rule="reflex", table_seq=6),
        lr_factor=0.5,
        batch=0,
    )
    message = through(wire.pb_from_observation(seen, LAYOUT))
    assert wire.observation_from_pb(message, LAYOUT) == seen  # type: ignore[arg-type]


def test_a_batch_that_nobody_knows_stays_unknown() -> None:
    seen = Observation(seq=0, step=0, values={})
    message = through(wire.pb_from_observation(seen, LAYOUT))
    assert wire.observation_from_pb(message, LAYOUT).batch is None  # type: ignore[arg-type]


def test_an_observation_of_another_layout_is_refused() -> None:
    message = wire.pb_from_observation(Observation(seq=0, step=0, values={}), LAYOUT)
    with pytest.raises(ValueError, match="3 values, 2 signals were registered"):
        wire.observation_from_pb(message, replace(LAYOUT, signals=LAYOUT.signals[:2]))


def test_a_table_keeps_its_predicates_to_the_last_bit() -> None:
    message = through(wire.pb_from_table(TABLE, durable_seq=40, with_residuals=True))
    assert wire.table_from_pb(message, None) == TABLE  # type: ignore[arg-type]
    assert message.durable_seq == 40  # type: ignore[attr-defined]


def test_residuals_come_once_and_are_kept() -> None:
    later = replace(TABLE, seq=42, armed=(Armed(residual=0, budget=1),))
    message = through(wire.pb_from_table(later, durable_seq=40, with_residuals=False))
    assert len(message.residuals) == 0  # type: ignore[attr-defined]
    assert wire.table_from_pb(message, TABLE) == later  # type: ignore[arg-type]
    of_another_policy = replace(TABLE, policy_version="other")
    for before in (None, of_another_policy):
        with pytest.raises(ValueError, match="residuals of policy abc did not come"):
            wire.table_from_pb(message, before)  # type: ignore[arg-type]


def test_layer_values_come_through_and_an_absent_one_stays_absent() -> None:
    seen = Observation(
        seq=0, step=0, values={}, vectors={"update_norm": (1.0, 2.0)}, declared=(Change.DATA_MIX,)
    )
    message = through(wire.pb_from_observation(seen, LAYOUT))
    assert wire.observation_from_pb(message, LAYOUT) == seen  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 layer values, 2 signals of 3 layer groups"):
        wire.observation_from_pb(message, replace(LAYOUT, layer_groups=("a", "b", "c")))  # type: ignore[arg-type]


def test_a_directive_and_its_ack_come_through() -> None:
    directive = Directive(
        id="0-7-a-scale_lr",
        epoch=0,
        seq=7,
        step=7,
        expires_seq=57,
        rule="a",
        action=Action.SCALE_LR,
        arguments={"by": 0.1, "over": 0.0},
        options={"layers": "embed"},
    )
    ack = Ack(id=directive.id, epoch=0, seq=8, step=9, outcome=Outcome.REFUSED, detail="no")
    assert wire.directive_from_pb(through(wire.pb_from_directive(directive))) == directive  # type: ignore[arg-type]
    assert wire.ack_from_pb(through(wire.pb_from_ack(ack))) == ack  # type: ignore[arg-type]


def test_what_this_version_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="empty node"):
        wire.node_from_pb(pb.Node())
    with pytest.raises(ValueError, match="xor"):
        wire.node_from_pb(pb.Node(operation=pb.Operation(operator="xor")))
    with pytest.raises(ValueError, match="kind of verdict"):
        wire.verdict_from_pb(pb.Verdict(kind=7))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reboot"):
        wire.directive_from_pb(pb.Directive(action="reboot"))
    with pytest.raises(ValueError, match="great"):
        wire.ack_from_pb(pb.Ack(outcome="great"))
