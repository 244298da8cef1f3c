"""Statistics of the accepted past."""

import statistics

import pytest

from trimtab.controller.engine.series import MAD_TO_SIGMA, Series


def series_of(values: list[float], size: int) -> Series:
    series = Series(frozenset({size}))
    for at, value in enumerate(values):
        series.push(at, value)
    return series


def test_a_statistic_is_unknown_until_half_the_window_is_there() -> None:
    assert series_of([1.0] * 3, 8).statistic("median", 8) is None
    assert series_of([1.0] * 4, 8).statistic("median", 8) == 1.0


def test_only_the_last_values_count() -> None:
    series = series_of([100.0] * 50 + [1.0, 2.0, 3.0, 4.0], 4)
    assert series.statistic("median", 4) == 2.5
    assert series.statistic("mad", 4) == 1.0
    assert series.statistic("mean", 4) == 2.5
    assert series.statistic("std", 4) == pytest.approx(statistics.pstdev([1, 2, 3, 4]))
    assert series.statistic("min", 4) == 1.0
    assert series.statistic("max", 4) == 4.0


def test_the_spread_of_a_flat_stretch_is_a_share_of_its_level() -> None:
    assert series_of([5.0] * 8, 8).statistic("spread", 8) == pytest.approx(0.01)


def test_the_spread_of_noise_is_the_robust_sigma() -> None:
    assert series_of([1.0, 2.0, 3.0, 4.0, 5.0], 5).statistic("spread", 5) == MAD_TO_SIGMA


def test_a_signal_that_is_always_zero_has_no_spread() -> None:
    assert series_of([0.0] * 8, 8).statistic("spread", 8) is None


def test_rewinding_gives_the_statistics_of_then() -> None:
    series = series_of([float(at % 7) for at in range(300)], 16)
    expected = series_of([float(at % 7) for at in range(200)], 16)
    series.rewind(200)
    assert series.statistic("median", 16) == expected.statistic("median", 16)
    assert series.statistic("mad", 16) == expected.statistic("mad", 16)


def test_memory_does_not_grow_with_the_run() -> None:
    series = series_of([1.0] * 5000, 16)
    assert len(series.values) <= 2 * series.keep
