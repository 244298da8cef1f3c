"""The dip statistic from a histogram is that of the values, within what is promised."""

import diptest
import numpy as np
import pytest

from trimtab.controller.engine import sketch


def histogram(values: np.ndarray) -> np.ndarray:
    clipped = np.clip(values, sketch.LOW, sketch.HIGH)
    return np.histogram(clipped, sketch.BINS, (sketch.LOW, sketch.HIGH))[0]


def normal(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 0.23, size)  # Adam's ratio on noise, beta1 0.9


@pytest.mark.parametrize("size", [500, 20_000])
@pytest.mark.parametrize("apart", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_dip_of_the_sketch_is_near_that_of_the_values(
    size: int, apart: float, seed: int
) -> None:
    values = normal(seed, size) + apart * np.random.default_rng(seed).choice([-1.0, 1.0], size)
    exact = diptest.dipstat(values)
    counts = histogram(values)
    found, _ = sketch.dip_of(counts)
    tolerance = 0.5 / min(sketch.SAMPLES, size) + counts.max() / size
    assert abs(found - exact) <= tolerance
    assert abs(found - exact) <= 0.015  # and much nearer than that in practice


def test_two_modes_stand_out_from_one() -> None:
    one, p_one = sketch.dip_of(histogram(normal(0, 10_000)))
    signs = np.random.default_rng(1).choice([-1.0, 1.0], 10_000)
    two, p_two = sketch.dip_of(histogram(normal(0, 10_000) * 0.4 + signs))
    assert one < 0.02 < 0.15 < two
    assert p_two < 0.01 < p_one


def test_sketches_of_shards_add_up_to_that_of_the_whole() -> None:
    values = normal(3, 5000)
    parts = histogram(values[:1234]) + histogram(values[1234:])
    assert sketch.dip_of(parts) == sketch.dip_of(histogram(values))


def test_each_group_and_all_together() -> None:
    counts = np.stack([histogram(normal(0, 1000)), np.zeros(sketch.BINS, dtype=np.int64)])
    values, vectors = sketch.dips(sketch.counts_of(counts.ravel().tolist(), 2))
    assert values["ratio_dip"] == vectors["ratio_dip"][0]
    assert np.isnan(vectors["ratio_dip"][1])
    assert np.isnan(vectors["ratio_dip_pvalue"][1])
    assert sketch.dips(np.zeros((2, sketch.BINS), dtype=np.int64)) == ({}, {})


def test_a_sketch_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a sketch of 3 counts, 2 layer groups of 256"):
        sketch.counts_of([1, 2, 3], 2)
