"""A job without a controller: the engine, the policy and the journal in its own process."""

import logging
from pathlib import Path
from typing import Any

import pytest
from jobs import BAD_BATCH, batch_of, loss_of, small_run, snapshot_of

from trimtab.agent import GuardConfig
from trimtab.controller.journal import Journal

BAD = 40

FRAGILE = (
    BAD_BATCH
    + """
  - name: tired
    when: lr > 0
    after: 60
    limit: 1 per 1000 steps
    do:
      scale_lr:
        by: 0.5
        over: 10 steps
"""
)


def config(folder: Path, policy: str, **changes: Any) -> GuardConfig:
    file = folder / "policy.yaml"
    file.write_text(policy)
    settings = {
        "address": None,
        "run": "laptop",
        "policy": str(file),
        "store": f"sqlite:///{folder}/journal.db",
        "overhead_budget": 1.0,
    }
    return GuardConfig(**(settings | changes))


def train(settings: GuardConfig, steps: int, start: int = 0) -> tuple[list[int], list[float]]:
    """Train with a batch that is loud; return the steps that changed nothing, and the LRs."""
    model, optimizer, _, guard = small_run(
        settings, loader=lambda at: batch_of(at, scale=20.0 if at == BAD else 1.0)
    )
    lrs: list[float] = []
    optimizer.register_step_pre_hook(lambda o, *_: lrs.append(o.param_groups[0]["lr"]))
    unchanged = []
    for step, batch in guard.steps(steps, start):
        loss = loss_of(model, batch)
        loss.backward()
        guard.observe(loss)
        if guard._channel is not None:  # judged by the table of the step before, as a real step is
            while guard._channel._queue or guard._channel.table.seq < guard._seq - 1:
                pass
        before = snapshot_of(model, optimizer)
        optimizer.step()
        if snapshot_of(model, optimizer) == before:
            unchanged.append(step)
        optimizer.zero_grad()
    return unchanged, lrs


def test_the_policy_acts_and_the_journal_says_why(tmp_path: Path) -> None:
    unchanged, lrs = train(config(tmp_path, FRAGILE), 100)
    assert unchanged == [BAD]
    halved = [step for step, lr in enumerate(lrs) if lr == 0.5e-2]
    assert len(halved) == 10 and 61 <= halved[0] <= 64
    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    rows = journal.interventions("laptop")
    first = rows[0]
    assert (first.rule, first.action, first.outcome) == (
        "bad-batch",
        "skip_batch",
        "recovered",
    )
    assert rows[0].step == BAD
    assert "loss" in rows[0].evidence
    assert {r.rule for r in rows} == {"bad-batch", "tired"}


def test_a_restart_goes_on_from_the_journal(tmp_path: Path) -> None:
    settings = config(tmp_path, BAD_BATCH)
    train(settings, 35)
    unchanged, _ = train(settings, 50, start=35)  # too few steps since to know what is loud
    assert unchanged == [BAD]


def test_observing_judges_and_records_and_does_nothing(tmp_path: Path) -> None:
    unchanged, lrs = train(config(tmp_path, FRAGILE, mode="observe"), 100)
    assert unchanged == []
    assert set(lrs) == {1e-2}
    rows = Journal(f"sqlite:///{tmp_path}/journal.db").interventions("laptop")
    outcomes = {(r.rule, r.outcome) for r in rows}
    assert outcomes == {("bad-batch", "missed"), ("tired", "refused")}


@pytest.mark.parametrize(
    "policy", ["rules: [", "version: 1\nrules:\n  - name: x\n    when: los > 1"]
)
def test_a_bad_policy_is_said_and_the_reflex_is_left(
    policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unchanged, _ = train(config(tmp_path, policy), 60)
    assert unchanged == []
    assert "the policy is NOT in force, only the reflex guards" in caplog.text
    assert "policy.yaml" in caplog.text


def test_a_shipped_policy_is_found_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    unchanged, _ = train(
        GuardConfig(address=None, run="laptop", policy="default", store="sqlite://"), 20
    )
    assert unchanged == []
    assert "NOT in force" not in caplog.text


def test_a_full_disk_stops_directives_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    unchanged, lrs = train(config(tmp_path, FRAGILE), 100)
    assert unchanged == [BAD]  # tables can be worked out again, so they need no journal
    assert set(lrs) == {1e-2}
    assert caplog.text.count("No space left on device") == 1
