"""The demo's numbers, on runs whose answer is known, and its picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.demo.report import Run, draw, figures, read_run, run_name, trailing_medians


def run_of(cause: str, losses: dict[int, float], vetoed: tuple[int, ...] = ()) -> Run:
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "index": step,
            "loss": losses.get(step, 2.0),
            "update_norm": 0.1,
            "vetoed": step in vetoed,
        }
        for step in range(320)
    ]
    return Run(cause=cause, guarded=bool(vetoed), lines=lines, validation_loss=1.5)


CLEAN = run_of("H", {})


def test_a_run_like_the_clean_one_lost_nothing() -> None:
    found = figures(run_of("E", {}), CLEAN)
    assert (found.steps_lost, found.excess, found.worst_loss) == (0, 0.0, 2.0)


def test_a_vetoed_foreign_batch_costs_one_step_and_its_own_loss_does_not_count() -> None:
    found = figures(run_of("E", {250: 5.0}, vetoed=(250,)), CLEAN)
    assert (found.steps_lost, found.excess, found.worst_loss) == (1, 0.0, 2.0)


def test_steps_above_the_clean_run_are_lost() -> None:
    found = figures(run_of("D", dict.fromkeys(range(200, 240), 3.0)), CLEAN)
    assert found.worst_loss == 3.0
    assert found.excess == pytest.approx(40.0)
    assert 40 <= found.steps_lost <= 48  # the mean looks up to 8 steps ahead


def test_a_record_is_read_back(tmp_path: Path) -> None:
    record = tmp_path / "e.jsonl"
    lines = [*CLEAN.lines[:3], {"validation_loss": 2.25}]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(record, "E", guarded=True)
    assert (run.name, run.validation_loss, len(run.lines)) == ("E-guarded", 2.25, 3)
    assert run_name("H", guarded=False) == "clean"


def test_a_smoothed_curve_does_not_rise_before_its_cause() -> None:
    smooth = trailing_medians([2.0] * 20 + [4.0] * 20)
    assert smooth[:20] == [2.0] * 20
    assert smooth[-1] == 4.0
    assert len(smooth) == 40


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    runs = [CLEAN, run_of("E", {250: 5.0, 251: 3.0}), run_of("E", {250: 5.0}, vetoed=(250,))]
    acted = [{"run": "demo-E-guarded", "step": 250, "action": "skip_batch"}]
    draw(runs, acted, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "p.png").stat().st_size > 20_000
