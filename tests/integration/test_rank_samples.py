"""What only one rank knows reaches the journal, and never holds up a training."""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from jobs import batch_of, loss_of, small_run
from serving import Served, wait_for

from trimtab.agent import GuardConfig
from trimtab.agent import reporter as reporter_module
from trimtab.agent.channel import JobDescription
from trimtab.agent.reporter import Reporter, Sample
from trimtab.controller.engine.model import Layout


def two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """Batch 7 of rank 1 is broken."""
    address = (folder / "address").read_text()
    model, optimizer, _, guard = small_run(GuardConfig(address=address, run=f"rank-{rank}-name"))
    losses = []
    for step, batch in guard.steps(20):
        broken = rank == 1 and step == 7
        loss = loss_of(model, batch + rank)
        (loss * (math.nan if broken else 1.0)).backward()
        guard.observe(loss, batch_ids=[f"shard-{rank}/{step}", step])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 10:  # a first registration takes seconds
            wait_for("the first samples are sent", lambda: not guard._reporter._queue)
    return {"losses": losses, "failures": guard.failures}


def test_each_rank_tells_of_its_own_batches(served: Served, tmp_path: Path) -> None:
    (tmp_path / "address").write_text(served.address)
    results = jobs.spawn(two_ranks, 2, tmp_path)
    rows = served.cli("samples", "rank-0-name", "--steps", "0-19")  # the leader names the run
    assert [(row["step"], row["rank"]) for row in rows] == [
        (step, rank) for step in range(20) for rank in (0, 1)
    ]
    for row in rows:
        rank, step = row["rank"], row["step"]
        assert row["loss"] == results[rank]["losses"][step]
        assert row["batch_ids"] == [f"shard-{rank}/{step}", str(step)]
        assert row["memory_mib"] > 10
    # Gradients are the same on both replicas: after the all_reduce nobody can tell who it was.
    assert {row["step"] for row in rows if row["nonfinite"]} == {7}
    assert all(row["step_time_s"] > 0 for row in rows if row["step"] > 1)
    [one] = {row["epoch"] for row in rows}
    assert one == 0
    assert len(served.cli("samples", "rank-0-name", "--steps", "5")) == 2
    assert served.cli("samples", "nobody", "--steps", "5") == []


def sample(seq: int, loss: Any = 1.0) -> Sample:
    return Sample(
        seq=seq,
        step=seq,
        loss=loss,
        step_time_s=0.1,
        nonfinite=0.0,
        batch_ids=(),
        dataset="",
    )


def reporter_to(address: str) -> Reporter:
    job = JobDescription(run="r", world_size=1, layout=Layout(signals=("loss",)), optimizer="X")
    return Reporter(address, job, 0)


@pytest.fixture
def silent_port() -> Any:
    """Listens and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_controller_that_hangs_costs_samples_and_no_time(
    silent_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "KEPT_SAMPLES", 50)
    reporter = reporter_to(silent_port)
    start = time.perf_counter()
    for seq in range(1000):
        reporter.send(sample(seq))
    assert time.perf_counter() - start < 1.0
    assert reporter.dropped == 950
    start = time.perf_counter()
    reporter.close(timeout_s=0.2)
    assert time.perf_counter() - start < 2.0


def test_a_sample_that_cannot_be_sent_is_counted_and_the_next_one_is_sent(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = reporter_to(served.address)
    reporter.send(sample(0, loss="no number"))
    wait_for("it is dropped", lambda: reporter.dropped == 1)
    assert "rank samples cannot be sent: ValueError" in caplog.text
    reporter.send(sample(1))
    wait_for("it arrives", lambda: served.cli("samples", "r"))
    reporter.close()


def test_a_dead_thread_leaves_a_bounded_queue(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "registered", None)  # nothing can be called
    monkeypatch.setattr(reporter_module.tenacity, "Retrying", lambda **_: lambda f: f())
    reporter = reporter_to("nowhere:1")
    wait_for("the thread gives up", lambda: not reporter._thread.is_alive())
    assert "rank samples are no longer sent; the job trains on" in caplog.text
    for seq in range(reporter_module.KEPT_SAMPLES + 10):
        reporter.send(sample(seq))
    assert reporter.dropped == 10
    reporter.close()


FORKING = """
import os, sys, time
sys.path.insert(0, "tests/integration")
from test_rank_samples import reporter_to, sample
reporter = reporter_to(sys.argv[1])
reporter.send(sample(0))
for _ in range(50):
    child = os.fork()
    if child == 0:
        reporter.send(sample(1))
        reporter.close()
        os._exit(0 if len(reporter._queue) <= 1 else 3)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(0.01)
reporter.close(timeout_s=0.1)
print("all forks ended well")
"""


def test_children_of_a_fork_neither_send_nor_hang_nor_upset_the_line(silent_port: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FORKING, silent_port],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": "tests"},
    )
    assert (run.returncode, run.stdout) == (0, "all forks ended well\n"), run.stderr
    assert "fork" not in run.stderr


def test_nothing_of_the_lines_is_left_when_the_loop_ends(served: Served) -> None:
    before = {thread.name for thread in threading.enumerate()}
    model, optimizer, _, guard = small_run(GuardConfig(address=served.address, run="leaves"))
    for _, batch in guard.steps(5):
        loss_of(model, batch).backward()
        optimizer.step()
    assert {t.name for t in threading.enumerate() if t.name.startswith("trimtab")} <= before
    assert len(served.cli("samples", "leaves")) == 5  # the last ones too


def test_without_batches_or_loss_a_sample_says_so(served: Served) -> None:
    model, optimizer, _, guard = small_run(GuardConfig(address=served.address, run="bare"))
    for _, batch in guard.steps(3):
        loss_of(model, batch).backward()
        optimizer.step()
    rows = served.cli("samples", "bare")
    assert [(row["loss"], row["batch_ids"]) for row in rows] == [(None, [])] * 3


def test_it_can_be_switched_off(served: Served) -> None:
    settings = GuardConfig(address=served.address, run="off", rank_samples=False)
    model, optimizer, _, guard = small_run(settings)
    for _ in guard.steps(3):
        loss = loss_of(model, batch_of(0))
        loss.backward()
        guard.observe(loss, batch_ids=torch.arange(2))
        optimizer.step()
    assert served.cli("samples", "off") == []
