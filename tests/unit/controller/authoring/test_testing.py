"""Unit tests of policies: what passes, what fails and how it says so."""

import random
from pathlib import Path

import pytest

from trimtab.controller.authoring.testing import run_suite, series
from trimtab.controller.document import PolicyError

POLICY = """
version: 1
defaults: {after: 0}
rules:
  - name: loud
    when: loss > 2 * median(loss, 16)
    do: skip_batch
"""
SUITE = """
policy: p.yaml
tests:
  - name: a loud batch
    series:
      loss: 2 ~1% x50, 9, 2 ~1% x20
    expect:
      - {step: 1050, rule: loud, action: skip_batch, outcome: recovered}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "p.yaml").write_text(POLICY)
    return tmp_path


def failures(folder: Path, suite: str) -> list[str]:
    (folder / "t.yaml").write_text(suite)
    return [line for result in run_suite(folder / "t.yaml") for line in result.failures]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2", [2.0]),
        ("2 x3", [2.0] * 3),
        ("1 to 3 x3, 9", [1.0, 2.0, 3.0, 9.0]),
        ("_ x2, -1e-3", [None, None, -1e-3]),
        ("5 decay 5 x2", [5.0, 5.0]),
    ],
)
def test_a_series_is_segments_one_after_the_other(text: str, values: list[float | None]) -> None:
    assert series(text, random.Random(0)) == values


def test_noise_is_around_the_value_and_the_same_for_a_seed() -> None:
    first, again = (series("2 ~1% x1000", random.Random(7)) for _ in range(2))
    known = [value for value in first if value is not None]
    assert first == again
    assert 0.018 < (sum((v - 2) ** 2 for v in known) / 1000) ** 0.5 < 0.022
    assert str(series("nan, inf", random.Random(0))) == "[nan, inf]"


def test_a_spike_decays_to_its_end() -> None:
    first, *_, last = series("9 decay 2 x30", random.Random(0))
    assert first == 9.0
    assert last is not None
    assert 2.0 < last < 2.1


def test_what_is_expected_and_nothing_else_passes(folder: Path) -> None:
    assert failures(folder, SUITE) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("step: 1050", "step: 1051"), "step 1051: loud did not decide skip_batch"),
        (
            (
                "expect:\n      - {step: 1050, rule: loud, action: skip_batch, outcome: recovered}",
                "expect: []",
            ),
            "step 1050: loud decided skip_batch (act), which is not expected: loss = 9 > ",
        ),
        (("step: 1050", "step: 1050-1051"), "step 1051: loud did not decide skip_batch"),
        (("recovered", "failed"), "step 1050: loud: outcome is recovered, not failed"),
        (("outcome: recovered", "mode: observe"), "step 1050: loud: mode is act, not observe"),
        (("outcome: recovered", "rung: 1"), "step 1050: loud: rung is 0, not 1"),
    ],
)  # fmt: skip
def test_a_difference_is_told(folder: Path, change: tuple[str, str], message: str) -> None:
    assert any(line.startswith(message) for line in failures(folder, SUITE.replace(*change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rule: loud", "rule: lowd"), "t.yaml:8:28: unknown rule 'lowd' (did you mean loud?)"),
        (("2 ~1% x50, 9", "2 % x50, 9"), "t.yaml:6:13: '2 % x50' is no segment of a series"),
        (("loss:", "lss:"), "t.yaml:6:12: unknown signal 'lss' (did you mean loss?)"),
        (("loss:", "update_norm[b]:"), "'b' is none of layer_groups: none"),
        (("step: 1050", "step: soon"), "t.yaml:8:16: 'soon' is no step, such as 300 or 300-307"),
        (("x50", "x5000000"), "longer than 1000000 steps"),
        (("p.yaml", "q.yaml"), "q.yaml: No such file"),
    ],
)
def test_a_wrong_file_points_at_its_place(
    folder: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(PolicyError) as error:
        failures(folder, SUITE.replace(*change))
    assert message in str(error.value)


def test_layer_groups_datasets_and_declared_changes_are_played(folder: Path) -> None:
    (folder / "p.yaml").write_text(
        "version: 1\ndefaults: {after: 0}\nrules:\n"
        "  - {name: deep, when: any_layer(update_norm > 5), do: skip_batch}\n"
        "  - {name: web, when: any_dataset(dataset_loss > 5), do: alert}\n"
        "  - {name: high, when: loss > 5, do: alert, hold_off: {data_mix: 2 steps}}\n"
    )
    suite = """
policy: p.yaml
tests:
  - name: all kinds
    start: 0
    layer_groups: [embed, head]
    series:
      loss: 1 x2, 9 x4
      dataset_loss[web]: 1 x3, 9
      update_norm[*]: 1 x6
      update_norm[head]: 1, 9
    declare: {2: [data_mix]}
    expect:
      - {step: 1, rule: deep, action: skip_batch, layers: [head]}
      - {step: 3, rule: web, action: alert, layers: [web]}
      - {step: 4-5, rule: high, action: alert}
"""
    assert failures(folder, suite) == []


def test_a_lowered_lr_lowers_the_lr_and_what_grows_with_it(folder: Path) -> None:
    (folder / "p.yaml").write_text(
        "version: 1\ndefaults: {after: 0}\nrules:\n"
        "  - {name: cut, when: loss > 5, do: {scale_lr: {by: 0.5, over: 3 steps}}, cooldown: 9}\n"
        "  - {name: low, when: lr < 0.6, do: alert}\n"
    )
    suite = """
policy: p.yaml
tests:
  - name: a cut and its end
    start: 0
    series: {loss: "1 x2, 9, 1 x9", lr: 1 x12}
    expect:
      - {step: 2, rule: cut, action: scale_lr}
      - {step: 3-5, rule: low, action: alert}
"""
    assert failures(folder, suite) == []
