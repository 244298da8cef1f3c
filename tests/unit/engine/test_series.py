"""Statistics of the accepted past."""

import math
import statistics
from fractions import Fraction

import pytest

from trimtab.controller.engine.series import (
    MAD_TO_SIGMA,
    MAX_WINDOW_STEPS,
    REWIND_STEPS,
    Needs,
    Series,
    window_of,
)

ALL = ("median", "mad", "mean", "std", "min", "max", "spread", "sigma", "slope", "baseline")


def series_of(values: list[float], size: int, *, log: bool = False) -> Series:
    windows = frozenset(window_of(name, size) for name in ALL)
    series = Series(Needs(windows=windows, decays=frozenset({0.9}), lag=size, log=log))
    for at, value in enumerate(values):
        series.offer(at, value, flagged=False, rebaseline=16)
    return series


def everything(series: Series, size: int) -> list[float | None]:
    found = [series.statistic(name, size, 0.0) for name in (*ALL, "lag")]
    found += [series.statistic("quantile", size, q) for q in (0.0, 0.3, 1.0)]
    return [*found, series.statistic("ewma", 0.9, 0), series.statistic("ewstd", 0.9, 0)]


def test_a_statistic_is_unknown_until_half_the_window_is_there() -> None:
    assert series_of([1.0] * 3, 8).statistic("median", 8, 0) is None
    assert series_of([1.0] * 4, 8).statistic("median", 8, 0) == 1.0
    assert series_of([1.0] * 3, 7).statistic("mean", 7, 0) is None
    assert series_of([1.0] * 7, 8).statistic("lag", 8, 0) is None


def test_only_the_last_values_count() -> None:
    series = series_of([100.0] * 50 + [1.0, 2.0, 3.0, 4.0], 4)
    assert series.statistic("median", 4, 0) == 2.5
    assert series.statistic("mad", 4, 0) == 1.0
    assert series.statistic("mean", 4, 0) == 2.5
    assert series.statistic("std", 4, 0) == pytest.approx(statistics.pstdev([1, 2, 3, 4]))
    assert series.statistic("min", 4, 0) == 1.0
    assert series.statistic("max", 4, 0) == 4.0
    assert series.statistic("slope", 4, 0) == 1.0
    assert series.statistic("quantile", 4, 0.5) == 2.5
    assert series.statistic("quantile", 4, 0.25) == 1.75
    assert series.statistic("lag", 4, 0) == 1.0


def test_a_baseline_leaves_out_the_newest_tenth_of_its_window() -> None:
    series = series_of([1.0] * 20 + [9.0, 9.0], 20)
    assert series.statistic("baseline", 20, 0) == 1.0
    assert series.statistic("max", 20, 0) == 9.0
    series.offer(22, 9.0, flagged=False, rebaseline=16)
    assert series.windows["sorted", 20, 2].statistic("max", 0) == 9.0


def test_a_decaying_mean_is_the_weighted_mean_of_all_that_was() -> None:
    values = [float(at % 5) for at in range(40)]
    series = series_of(values, 4)
    weights = [0.9**age for age in range(39, -1, -1)]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    square = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
    assert series.statistic("ewma", 0.9, 0) == pytest.approx(mean, rel=1e-12)
    assert series.statistic("ewstd", 0.9, 0) == pytest.approx((square / sum(weights)) ** 0.5)
    assert series_of([1.0] * 6, 4).statistic("ewma", 0.9, 0) is None
    assert series_of([1.0] * 7, 4).statistic("ewma", 0.9, 0) == pytest.approx(1.0)


def test_the_spread_of_a_flat_stretch_is_a_share_of_its_level() -> None:
    assert series_of([5.0] * 8, 8).statistic("spread", 8, 0) == pytest.approx(0.01)
    assert series_of([5.0] * 8, 8, log=True).statistic("log_spread", 8, 0) == 0.002


def test_the_spread_of_noise_is_the_robust_sigma() -> None:
    assert series_of([1.0, 2.0, 3.0, 4.0, 5.0], 5).statistic("spread", 5, 0) == MAD_TO_SIGMA


@pytest.mark.parametrize("scale", ["spread", "sigma"])
def test_a_signal_that_is_always_zero_has_no_scale(scale: str) -> None:
    assert series_of([0.0] * 8, 8).statistic(scale, 8, 0) is None


def test_of_logarithms_values_that_are_not_positive_stay_out() -> None:
    series = series_of([1.0, -1.0, 0.0, math.e, math.inf], 2, log=True)
    assert series.values == [0.0, 1.0]


def test_rewinding_gives_the_statistics_of_then() -> None:
    series = series_of([float(at % 7) for at in range(300)], 16)
    expected = series_of([float(at % 7) for at in range(200)], 16)
    series.rewind(200)
    assert everything(series, 16) == everything(expected, 16)


def test_a_long_rewind_after_old_values_were_dropped_is_still_exact() -> None:
    values = [math.sin(at) for at in range(5000)]
    series, expected = series_of(values, 16), series_of(values[:-REWIND_STEPS], 16)
    series.rewind(5000 - REWIND_STEPS)
    assert everything(series, 16) == everything(expected, 16)


def test_a_restored_series_goes_on_to_the_last_bit() -> None:
    values = [math.sin(at) for at in range(5000)]
    series = series_of(values, 16)
    series.offer(5000, 7.0, flagged=True, rebaseline=2)
    restored = Series(series.needs)
    restored.restore(series.snapshot())
    for copy in (series, restored):
        assert copy.offer(5001, 7.5, flagged=True, rebaseline=2)  # the second in a row
        for at in range(5002, 5020):
            copy.offer(at, math.cos(at), flagged=False, rebaseline=2)
    assert everything(series, 16) == everything(restored, 16)


def test_flagged_values_stay_out_until_they_are_the_new_level() -> None:
    series = series_of([1.0] * 8, 8)
    for at in range(8, 11):
        assert not series.offer(at, 5.0, flagged=True, rebaseline=4)
    assert series.statistic("max", 8, 0) == 1.0
    assert series.offer(11, 5.0, flagged=True, rebaseline=4)
    assert series.values == [5.0] * 4


def test_one_good_value_ends_a_run_of_flagged_ones() -> None:
    series = series_of([1.0] * 8, 8)
    for at in range(8, 100):
        assert not series.offer(at, 5.0, flagged=at % 4 != 0, rebaseline=4)


def test_a_level_of_nothing_but_nan_is_none() -> None:
    series = series_of([1.0] * 8, 8)
    for at in range(8, 30):
        assert not series.offer(at, math.nan, flagged=True, rebaseline=4)
    assert series.values == [1.0] * 8


def test_memory_does_not_grow_with_the_run() -> None:
    series = series_of([1.0] * 5000, 16)
    assert len(series.values) <= 2 * series.keep
    assert series.keep <= MAX_WINDOW_STEPS + REWIND_STEPS


@pytest.mark.parametrize("values", [[1e308, -1e308] * 4, [1e-300, 2e-300] * 4, [1e-200, 1e200] * 4])
def test_extreme_values_overflow_nothing(values: list[float]) -> None:
    series = series_of(values, 8)
    exact = sum(map(Fraction, values)) / len(values)
    assert series.statistic("mean", 8, 0) == float(exact)
    assert all(found is not None for found in everything(series, 8)[:8])
