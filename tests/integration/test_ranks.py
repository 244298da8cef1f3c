"""Two real gloo processes: one verdict, one rollback, and nobody waits for a rank that failed."""

from pathlib import Path

import jobs
import pytest


def test_nan_on_one_rank_leaves_every_byte_on_all_ranks(tmp_path: Path) -> None:
    first, second = jobs.spawn(jobs.nan_on_one_rank, 2, tmp_path)
    assert first["unchanged"] == second["unchanged"] == [20, 20]
    assert first["kinds"] == second["kinds"]
    assert [at for at, kind in enumerate(first["kinds"]) if kind == "veto"] == [20, 50]
    assert first["observations"] == second["observations"]


def test_the_leaders_verdict_holds_on_all_ranks(tmp_path: Path) -> None:
    first, second = jobs.spawn(jobs.armed_veto, 2, tmp_path)
    assert first["vetoed"] == second["vetoed"] == [50]
    assert first["losses"] == second["losses"]
    assert first["norms"] == pytest.approx([1.0] * 60, rel=1e-6)  # replicas count once
    assert first["mismatches"] == 0


def test_a_rank_that_cannot_measure_costs_the_step_its_guard_and_nothing_else(
    tmp_path: Path,
) -> None:
    first, second = jobs.spawn(jobs.broken_probe_on_one_rank, 2, tmp_path)
    expected = [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 10, 11, 12, 13, 14]
    assert first["seen"] == second["seen"] == expected
    assert (first["failures"], second["failures"]) == (0, 5)


def test_a_rollback_takes_the_newest_point_that_every_rank_has(tmp_path: Path) -> None:
    first, second = jobs.spawn(jobs.roll_back_everywhere, 2, tmp_path)
    assert first["acks"] == [["pending", 20]]
    for result in (first, second):
        trail = result["trail"]
        at = next(i for i in range(1, len(trail)) if trail[i][0] < trail[i - 1][0])
        assert trail[at][:2] == [20, 20]
        # the same batches again: the same losses, to the last bit
        replayed = trail[at:]
        assert replayed[: at - 20] == trail[20:at]
        assert replayed[-1][0] == 44


def test_without_a_common_point_nothing_is_touched_and_the_reason_is_told(tmp_path: Path) -> None:
    first, second = jobs.spawn(jobs.refuse_everywhere, 2, tmp_path)
    assert first["acks"] == [["refused", "no restore point that old on every rank"]]
    assert first["steps"] == second["steps"] == [[step, step] for step in range(25)]
