"""What holds of the grader for any log."""

import json
import math
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.controller.engine.episode import LEAD_SIGNALS, MAX_DATASETS, Episode, Grader

MAX_SNAPSHOT_BYTES = 8_000
"""Of one signal; the numbers of a window, its blocks and an open episode."""

NAMES = ("loss", *LEAD_SIGNALS, "lr", "dataset_loss[a]", "dataset_loss[b]")

level = st.floats(0.9, 1.1)
odd = st.sampled_from(
    [math.nan, math.inf, -math.inf, 0.0, -1.0, 5e-324, 1.7e308, -1.7e308, 3.0, 1e30]
)
rows = st.tuples(
    st.sampled_from([1, 1, 1, 1, 1, 0, -7, 40]),
    st.dictionaries(st.sampled_from(NAMES), st.one_of(level, level, level, level, odd)),
    st.sampled_from([""] * 12 + ["vetoed", "declared"]),
)
logs = st.tuples(st.integers(0, 140), st.integers(0, 2**32), st.lists(rows, max_size=120))


def steps_of(log: Any) -> list[tuple[int, dict[str, float], str]]:
    """A calm past of some length, so that bands judge, and then the rows."""
    calm, seed, odd_rows = log
    rng = random.Random(seed)
    steps = [(i, {name: rng.gauss(1, 0.02) for name in NAMES}, "") for i in range(calm)]
    step = calm
    for stride, values, flag in odd_rows:
        step += stride
        steps.append((step, values, flag))
    return steps


def feed(grader: Grader, steps: list[tuple[int, dict[str, float], str]]) -> list[Episode]:
    ended: list[Episode] = []
    for step, values, flag in steps:
        ended += grader.saw(step, values, vetoed=flag == "vetoed", declared=flag == "declared")
    return ended


@given(logs)
@settings(max_examples=100, deadline=None)
def test_no_log_raises_and_every_episode_makes_sense(log):
    grader = Grader()
    for episode in feed(grader, steps_of(log)) + grader.finish():
        assert episode.steps_lost >= 1
        known = (episode.peak, episode.level_before, episode.level_after)
        assert all(value is None or math.isfinite(value) for value in known)
    assert grader.finish() == []


@given(logs, st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_a_restored_grader_goes_on_as_the_old_one(log, share):
    steps = steps_of(log)
    cut = int(share * len(steps))
    old = Grader()
    feed(old, steps[:cut])
    new = Grader.restore(json.loads(json.dumps(old.snapshot(), allow_nan=False)))
    assert feed(new, steps[cut:]) == feed(old, steps[cut:])
    assert json.dumps(new.snapshot()) == json.dumps(old.snapshot())
    assert new.finish() == old.finish()


@given(st.integers(0, 2**32), st.sampled_from(["noise", "rise", "nan", "wild"]))
@settings(max_examples=12, deadline=None)
def test_a_snapshot_stays_small(seed, how):
    rng, grader = random.Random(seed), Grader()
    for step in range(3000):
        value = {
            "noise": rng.gauss(1, 0.1),
            "rise": rng.gauss(1 + step * step / 1e5, 0.01),
            "nan": 1.0 if step < 200 else math.nan,
            "wild": rng.choice([rng.gauss(1, 0.1), rng.expovariate(1) ** 4, math.inf]),
        }[how]
        grader.saw(step, {name: value for name in NAMES if rng.random() < 0.9})
    assert len(json.dumps(grader.snapshot())) <= len(NAMES) * MAX_SNAPSHOT_BYTES


def test_names_of_datasets_do_not_fill_the_memory():
    grader = Grader()
    for step in range(500):
        grader.saw(step, {"loss": 1.0, f"dataset_loss[{step}]": 1.0})
    assert len(grader.snapshot()["levels"]) == MAX_DATASETS


@given(st.integers(0, 2**32), st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1)))
@settings(max_examples=30, deadline=None)
def test_missing_signals_make_no_clean_log_an_episode(seed, missing):
    rng, grader = random.Random(seed), Grader()
    steps = [
        (
            step,
            {n: rng.gauss(2, 0.03) for n in NAMES if rng.random() >= missing.get(n, 0.0)},
            "",
        )
        for step in range(600)
    ]
    assert feed(grader, steps) + grader.finish() == []
