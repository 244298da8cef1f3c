"""Whatever the sharding, every statistic is that of one process that holds everything."""

import math
from pathlib import Path
from typing import Any

import jobs
import layouts
import pytest


def differ(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) != math.isnan(other)
    return not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return every statistic that differs, with both values."""
    wrong = [
        f"{name}: {found['values'].get(name)} {value}"
        for name, value in expected["values"].items()
        if differ(found["values"].get(name, math.nan), value)
    ]
    for name, vector in expected["vectors"].items():
        pairs = zip(found["vectors"][name], vector, strict=True)
        wrong += [f"{name}[{at}]: {a} {b}" for at, (a, b) in enumerate(pairs) if differ(a, b)]
    moved = sum(abs(a - b) for a, b in zip(found["sketch"], expected["sketch"], strict=True))
    if moved > 0.02 * sum(expected["sketch"]):  # an element at an edge may fall on either side
        wrong.append(f"sketch: {moved} elements in another bin")
    return wrong


ALL = [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("tp", 2), ("fsdp2-tp", 4)]


@pytest.mark.parametrize(
    ("layout", "ranks", "kind"),
    [(layout, ranks, "adamw") for layout, ranks in ALL]
    + [("fsdp2", 2, "sgd"), ("fsdp2-tp", 4, "sgd"), ("ddp", 2, "rmsprop"), ("hsdp", 4, "rmsprop")],
)
def test_every_statistic_is_that_of_one_process(
    layout: str, ranks: int, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / f"{layout}.{kind}.{ranks}"
    folder.mkdir()
    found = jobs.spawn(layouts.layout_job, ranks, folder)
    expected = layouts.reference(kind, {"tp": 1, "fsdp2-tp": ranks // 2}.get(layout, ranks))
    assert found[0][-1]["groups"] == ["frozen", "embed", "blocks.0", "blocks.1", "head"]
    same_everywhere_and_as(expected, found)
    copies = {"tp": ranks, "fsdp2-tp": 2}.get(layout, 1)  # each of them tells of the same rows
    assert found[0][-1]["tokens"] == expected[-1]["tokens"] * copies


def same_everywhere_and_as(
    expected: list[dict[str, Any]], found: list[list[dict[str, Any]]]
) -> None:
    for rank in range(1, len(found)):
        assert str(found[rank]) == str(found[0])  # to the last bit
    for step, (seen, wanted) in enumerate(zip(found[0], expected, strict=True)):
        assert differences(seen, wanted) == [], f"step {step}"
        assert seen["loss"] == pytest.approx(wanted["loss"])


VETOED = ("adamw-fused", "adamw")


@pytest.mark.parametrize(("layout", "ranks"), ALL)
def test_a_veto_leaves_every_byte_of_every_rank(layout: str, ranks: int, tmp_path: Path) -> None:
    # Torch has no fused step for a mixture of DTensors and plain tensors.
    kinds = ["adamw"] if layout == "tp" else ["adamw-fused"] if ranks == 4 else list(VETOED)
    for kind in kinds:
        folder = tmp_path / f"{layout}.{kind}.{ranks}"
        folder.mkdir()
        for seen in jobs.spawn(layouts.veto_job, ranks, folder):
            assert seen == {
                "unchanged": [5],
                "kinds": ["apply"] * 5 + ["veto"] + ["apply"] * (layouts.STEPS - 6),
                "finite": True,
                "failures": 0,
            }


def test_pipeline_stages_bring_their_own_layers(tmp_path: Path) -> None:
    found = jobs.spawn(layouts.pipeline_job, 2, tmp_path)
    expected = layouts.reference("adamw", 1)
    assert found[0][-1]["groups"] == ["blocks.0", "embed", "blocks.1", "head"]
    order = [expected[0]["groups"].index(name) for name in found[0][-1]["groups"]]
    for wanted in expected:
        wanted["vectors"] = {
            name: [vector[at] for at in order] for name, vector in wanted["vectors"].items()
        }
        bins = len(wanted["sketch"]) // len(wanted["groups"])
        wanted["sketch"] = [
            count for at in order for count in wanted["sketch"][at * bins : (at + 1) * bins]
        ]
        del wanted["values"]["param_norm"], wanted["values"]["update_ratio_norm"]  # of `frozen`
    same_everywhere_and_as(expected, found)


def test_a_rank_without_gradients_joins(tmp_path: Path) -> None:
    found = jobs.spawn(layouts.idle_rank_job, 2, tmp_path)
    for step, wanted in enumerate(layouts.reference("adamw", 1)):
        assert str(found[0][step]) == str(found[1][step])
        for name in ("grad_norm", "update_norm", "exp_avg_norm"):
            assert found[0][step]["values"][name] == pytest.approx(wanted["values"][name])
            assert math.isnan(found[0][step]["vectors"][name][-1])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("optimizer", "ranks 0 and 1 differ: optimizer is AdamW and SGD"),
        ("settings", "ranks 0 and 1 differ: sketch_every_steps is 1 and 7"),
        ("groups", "ranks 0 and 1 differ: the layer group of parameter"),
        ("shape", "ranks 0 and 1 differ: the shape of parameter frozen is [3] and [4]"),
        ("broken", "rank 1: ZeroDivisionError"),
        ("stages-of-one-name", "parameter head.weight is whole on several ranks"),
    ],
)
def test_ranks_that_do_not_fit_are_named_and_train_on_unguarded(
    kind: str, reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / kind
    folder.mkdir()
    for seen in jobs.spawn(layouts.refused_job, 2, folder):
        assert reason in seen["refusal"]
        assert (seen["steps"], seen["seen"]) == ([0, 1, 2], False)
