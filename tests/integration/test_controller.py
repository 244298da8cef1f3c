"""A real controller on Ray, a real agent, a real line between them."""

import logging
import os
import signal
import socket
import time
from pathlib import Path

import grpc
import pytest
from jobs import batch_of, loss_of, small_run, snapshot_of
from paced import BAD_AT, JUMP_AT, fresh, job_of, train
from serving import Served, alive, wait_for

from trimtab.agent import Guard, GuardConfig
from trimtab.controller.engine.model import VerdictKind
from trimtab.controller.journal import Journal
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import trimtab_pb2_grpc as rpc
from trimtab.protos import wire

SPOKEN = wire.PROTOCOL_VERSION


def vetoes(guard: Guard, seen: list[str]) -> None:
    assert guard.observation is not None
    if guard.observation.verdict.kind is VerdictKind.VETO:
        seen.append(f"{guard.observation.step}:{guard.observation.verdict.rule}")


def test_what_the_job_did_the_journal_the_cli_and_the_metrics_tell(served: Served) -> None:
    job = job_of(served.address, "told")
    guard, seen = job[2], []
    for _ in train(job, 120):
        vetoes(guard, seen)
        wait_for("a fresh table", lambda: fresh(guard))
    assert f"{BAD_AT}:bad-batch" in seen
    assert f"{JUMP_AT}:lr-jump" in seen
    assert guard.failures == 0

    journal = Journal(f"sqlite:///{served.store}")
    told = [
        (r["step"], r["rule"], r["action"], r["outcome"]) for r in journal.interventions("told")
    ]
    journal.close()
    vetoed = [(int(s.split(":")[0]), s.split(":")[1]) for s in seen]
    assert [(s, r) for s, r, action, _ in told if action == "skip_batch"] == vetoed
    assert [(s, r) for s, r, action, _ in told if action == "scale_lr"] == [(JUMP_AT, "lr-jump")]
    assert {outcome for *_, outcome in told} == {"recovered"}

    shown = served.cli("interventions", "--run", "told")
    assert [(i["step"], i["rule"], i["action"], i["outcome"]) for i in shown] == told
    assert shown[0]["evidence"][0].startswith("loss = ")
    [run] = [run for run in served.cli("runs") if run["run"] == "told"]
    assert (run["step"], run["interventions"], run["connected"]) == (119, len(told), False)

    metrics = served.scrape()
    for rule, action in {(rule, action) for _, rule, action, _ in told}:
        count = sum(1 for entry in told if entry[1:3] == (rule, action))
        line = (
            f'trimtab_interventions_total{{action="{action}",rule="{rule}",run="told"}} {count}.0'
        )
        assert line in metrics
    assert 'trimtab_step{run="told"} 119.0' in metrics
    assert 'trimtab_verdict_mismatches_total{run="told"} 0.0' in metrics
    log = served.log.read_text()
    assert f"run=told step={BAD_AT} rule=bad-batch action=skip_batch mode=act" in log
    assert "why=loss = " in log


def test_a_rule_rolls_a_run_back_and_the_run_goes_on_from_there(served: Served) -> None:
    model, optimizer, _, guard = small_run(
        GuardConfig(address=served.address, run="back", restore_every_steps=10)
    )
    trail = []
    for step, batch in guard.steps(60):
        if len(trail) == 43:  # a wrong edit; going back undoes it
            optimizer.param_groups[0]["lr"] *= 0.1
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        assert guard.observation is not None
        trail.append((step, guard.observation.batch))
        wait_for("a fresh table", lambda: fresh(guard))
    at = next(i for i in range(1, len(trail)) if trail[i][0] < trail[i - 1][0])
    # matched at 43, 44, 45; the newest point two clean steps before that is the one of step 40
    assert 45 <= trail[at - 1][0] < 50
    assert trail[at] == (40, 45)
    assert trail[-1] == (59, 64)
    assert optimizer.param_groups[0]["lr"] == 0.01
    [told] = served.cli("interventions", "--run", "back")
    assert (told["step"], told["rule"], told["action"]) == (45, "lr-drop", "rollback")
    assert told["outcome"] == "recovered"
    assert told["detail"] == f"from step {trail[at - 1][0] + 1} to 40, next batch 45"


def test_a_new_process_of_a_run_is_its_next_epoch_and_the_old_one_is_fenced(
    served: Served,
) -> None:
    epochs = []
    with grpc.insecure_channel(served.address) as channel:
        for session in ("a", "a", "b"):
            answer = rpc.GatewayStub(channel).Register(
                pb.RegisterRequest(
                    protocol_version=wire.PROTOCOL_VERSION, run="again", session=session
                )
            )
            epochs.append(answer.epoch)
    assert epochs == [0, 0, 1]
    hello = pb.AgentMessage(hello=pb.Hello(run="again", epoch=0))
    with grpc.insecure_channel(answer.address) as channel, pytest.raises(grpc.RpcError) as error:
        next(rpc.SteeringStub(channel).Steer(iter([hello])))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "epoch 0 is not run again epoch 1" in error.value.details()


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (
            pb.RegisterRequest(protocol_version=99, run="x", session="x"),
            grpc.StatusCode.FAILED_PRECONDITION,
            f"speaks protocol version {SPOKEN}, the agent 99",
        ),
        (
            pb.RegisterRequest(protocol_version=wire.PROTOCOL_VERSION, run="a b", session="x"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "run 'a b' is no name",
        ),
        (
            pb.RegisterRequest(protocol_version=wire.PROTOCOL_VERSION, run="x"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "is no name",
        ),
    ],
)
def test_a_registration_that_cannot_be_says_why(
    served: Served, request_: pb.RegisterRequest, code: grpc.StatusCode, message: str
) -> None:
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        rpc.GatewayStub(channel).Register(request_)
    assert error.value.code() is code
    assert message in error.value.details()


def test_an_observation_that_does_not_fit_is_refused_and_the_run_lives_on(
    served: Served,
) -> None:
    with grpc.insecure_channel(served.address) as channel:
        answer = rpc.GatewayStub(channel).Register(
            pb.RegisterRequest(
                protocol_version=wire.PROTOCOL_VERSION, run="hostile", session="x", signals=["loss"]
            )
        )
    hello = pb.AgentMessage(hello=pb.Hello(run="hostile", epoch=0))
    wrong = pb.AgentMessage(observation=pb.Observation(seq=0, values=[1.0, 2.0]))
    huge = pb.AgentMessage(ack=pb.Ack(detail="x" * (wire.MAX_MESSAGE_BYTES + 1)))
    for message, code in (
        (wrong, grpc.StatusCode.INVALID_ARGUMENT),
        (huge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ):
        with (
            grpc.insecure_channel(answer.address) as channel,
            pytest.raises(grpc.RpcError) as error,
        ):
            list(rpc.SteeringStub(channel).Steer(iter([hello, message])))
        assert error.value.code() is code
    right = pb.AgentMessage(observation=pb.Observation(seq=0, values=[1.0]))
    with grpc.insecure_channel(answer.address) as channel:
        tables = list(rpc.SteeringStub(channel).Steer(iter([hello, right])))
    assert [message.table.seq for message in tables] == [-1, 0]


def test_another_protocol_version_is_said_and_the_job_trains_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wire, "PROTOCOL_VERSION", 99)
    job = job_of(served.address, "old")
    guard = job[2]
    for _ in train(job, 20):
        time.sleep(0.02)
    guard.close()
    assert f"speaks protocol version {SPOKEN}, the agent 99" in caplog.text
    assert caplog.text.count("the job trains on") == 1
    assert guard.observation is not None
    assert guard.observation.seq == 19


def test_a_server_that_is_no_trimtab_is_named(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    # A run's own server is a gRPC server without the gateway's service.
    with grpc.insecure_channel(served.address) as channel:
        answer = rpc.GatewayStub(channel).Register(
            pb.RegisterRequest(
                protocol_version=wire.PROTOCOL_VERSION, run="wrong-door", session="x"
            )
        )
    job = job_of(answer.address, "wrong-door")
    for _ in train(job, 20):
        time.sleep(0.02)
    assert "is no trimtab controller of this protocol version" in caplog.text


def test_a_controller_that_is_never_there_costs_nothing_but_its_tables(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused, and nobody else's
        job = job_of(f"127.0.0.1:{taken.getsockname()[1]}", "alone")
        guard = job[2]
        started = time.monotonic()
        steps = list(train(job, 200))
        took = time.monotonic() - started
    assert steps == list(range(200))
    assert took < 10.0  # nothing waited for the network but the hanging up
    assert caplog.text.count("not reachable") == 1
    assert guard.failures == 0
    # and it trained as without any controller
    alone = small_run(loader=lambda index: batch_of(index, scale=20.0 if index == BAD_AT else 1.0))
    list(train((alone[0], alone[1], alone[3]), 200))
    assert snapshot_of(*job[:2]) == snapshot_of(*alone[:2])  # type: ignore[arg-type]


def test_a_killed_controller_leaves_the_last_table_in_force_and_gives_fresh_ones_when_back(
    mortal: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    job = job_of(mortal.address, "survivor")
    guard = job[2]
    seen: list[str] = []
    for step in train(job, 120):
        vetoes(guard, seen)
        assert guard.observation is not None
        verdict = guard.observation.verdict
        if step < 55 or step >= 80:
            wait_for("a fresh table", lambda: fresh(guard))
        if step == 54:
            mortal.kill()
        if step == 60:  # judged by the table of step 54
            assert verdict == type(verdict)(kind=VerdictKind.VETO, rule="bad-batch", table_seq=54)
        if step == 79:
            mortal.start()
            wait_for("the controller's first table", lambda: fresh(guard), 60)
    assert f"{BAD_AT}:bad-batch" in seen
    assert f"{JUMP_AT}:lr-jump" in seen
    assert caplog.text.count("not reachable") == 1
    assert caplog.text.count("is back") == 1
    # The gap was sent and journalled: nothing lost, nothing twice.
    told = [f"{i['step']}:{i['rule']}" for i in mortal.cli("interventions")]
    assert sorted(set(told)) == sorted(set(seen))
    assert 'trimtab_step{run="survivor"} 119.0' in mortal.scrape()
    assert 'trimtab_verdict_mismatches_total{run="survivor"} 0.0' in mortal.scrape()


def test_a_killed_run_actor_comes_back_with_everything_it_knew(mortal: Served) -> None:
    job = job_of(mortal.address, "phoenix")
    guard = job[2]
    seen: list[str] = []
    for step in train(job, 120):
        vetoes(guard, seen)
        wait_for("a fresh table", lambda: fresh(guard))
        if step in (50, BAD_AT, JUMP_AT):
            os.kill(mortal.actor("RunActor"), signal.SIGKILL)
            guard._channel.table = None  # type: ignore[union-attr]
            wait_for("a table from the restarted actor", lambda: fresh(guard))
    told = mortal.cli("interventions")
    assert [f"{i['step']}:{i['rule']}" for i in told if i["action"] == "skip_batch"] == seen
    assert [i["step"] for i in told if i["action"] == "scale_lr"] == [JUMP_AT]
    assert {i["outcome"] for i in told} == {"recovered"}


def test_a_controller_that_is_asked_to_stop_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("trimtab-*"))
    controller = Served(tmp_path, "version: 1\nrules: [{name: a, when: loss > 9, do: alert}]\n")
    family = controller.descendants()
    assert len(family) > 3
    assert controller.stop() == 0
    wait_for("all its processes end", lambda: not any(map(alive, family)))
    assert set(Path("/tmp").glob("trimtab-*")) <= before


def test_expired_tables_leave_the_reflex_and_it_is_said_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(served.address, "expired")
    guard = job[2]
    for step in train(job, 150):
        if step < 20:
            wait_for("a fresh table", lambda: fresh(guard))
        if step == 20:
            channel = guard._channel
            assert channel is not None
            kept = channel.table
            channel.close()
        if step > 20:
            channel.table = kept
        if step == BAD_AT:
            assert guard.observation is not None
            assert guard.observation.verdict.rule == "bad-batch"
    assert guard.observation is not None
    assert guard.observation.verdict.table_seq == -1
    assert caplog.text.count("the armed table has expired") == 1
