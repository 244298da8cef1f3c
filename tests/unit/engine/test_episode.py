"""The gallery of instabilities as seeded series: what each is graded as, and where it began."""

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from trimtab.controller.engine.episode import (
    FAST_STEPS,
    GIVE_UP_STEPS,
    Episode,
    EpisodeKind,
    Grader,
)
from trimtab.controller.engine.excursion import QUIET_STEPS, Band

CALM = 300
BLOOM_176B = [  # step, loss, grad norm: the rows of 2022-04-12 in the BLOOM chronicles
    (31214, 2.198845, 0.242),
    (31215, 2.220424, 0.947),
    (31216, 2.595213, 2.39),
    (31217, 2.241558, 15.886),
    (31218, 2.345279, 145.119),
    (31219, 5.098124, 960.351),
    (31220, 3.492029, 353.201),
    (31221, 3.213059, 379.33),
    (31222, 2.804948, 650.246),
    (31250, 2.215699, 0.267),
    (31251, 2.235667, 0.205),
]


def noisy(levels: Iterable[float], *, noise: float = 0.01, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [level * (1 + rng.gauss(0, noise)) for level in levels]


def grade(
    *, first: int = 0, grader: Grader | None = None, **signals: Sequence[float]
) -> list[Episode]:
    grader = grader or Grader()
    names = {
        name.replace("dataset_", "dataset_loss[") + "]" * name.startswith("dataset_"): each
        for name, each in signals.items()
    }
    ended: list[Episode] = []
    for index in range(max(len(each) for each in signals.values())):
        here = {name: each[index] for name, each in names.items() if index < len(each)}
        ended += grader.saw(first + index, here)
    return ended + grader.finish()


def only(ended: list[Episode]) -> Episode:
    assert len(ended) == 1, ended
    return ended[0]


def with_spike(at: int, shape: Sequence[float], *, length: int = 500) -> list[float]:
    series = noisy([2.0] * length)
    series[at : at + len(shape)] = shape
    return series


def test_a_spike_that_is_back_soon_is_a_fast_recovery():
    episode = only(grade(loss=with_spike(CALM, [3.0, 4.0, 3.0, 2.5])))
    assert episode.kind is EpisodeKind.FAST_RECOVERY
    assert (episode.onset_step, episode.peak_step, episode.end_step) == (300, 301, 303)
    assert episode.peak == 4.0
    assert episode.steps_lost == 4
    assert episode.level_before == pytest.approx(2.0, rel=0.01)
    assert episode.level_after == pytest.approx(2.0, rel=0.01)
    assert episode.leads == {}
    assert episode.datasets == ()


def test_a_level_regained_after_more_than_fast_steps_is_a_slow_recovery():
    fall = noisy([2.0 + 2.0 * math.exp(-index / 60) for index in range(400)])
    episode = only(grade(loss=with_spike(CALM, fall, length=1000)))
    assert episode.kind is EpisodeKind.SLOW_RECOVERY
    assert episode.onset_step == CALM
    assert FAST_STEPS < episode.steps_lost == episode.end_step - CALM + 1
    assert 150 < episode.steps_lost < 350


def test_a_spike_that_settles_above_its_level_is_a_partial_recovery():
    fall = noisy([2.2 + 3.0 * math.exp(-index / 10) for index in range(1700)])
    episode = only(grade(loss=with_spike(CALM, fall, length=2000)))
    assert episode.kind is EpisodeKind.PARTIAL_RECOVERY
    assert episode.onset_step == episode.peak_step == CALM
    assert episode.level_after == pytest.approx(2.2, rel=0.01)
    assert episode.steps_lost == GIVE_UP_STEPS + 1


def test_a_spike_that_comes_down_and_rises_again_has_diverged():
    curve = [2.1 + 4.0 * math.exp(-index / 8) + 0.003 * index for index in range(600)]
    episode = only(grade(loss=with_spike(CALM, noisy(curve), length=900)))
    assert episode.kind is EpisodeKind.DIVERGED
    assert episode.peak_step == CALM


def test_a_slow_rise_without_a_spike_has_diverged_from_where_it_began():
    rise = [2.0] * 600 + [2.0 * (1 + 0.0004 * index) for index in range(4000)]
    ended = grade(loss=noisy(rise))
    assert only(ended).kind is EpisodeKind.DIVERGED
    assert 570 < ended[0].onset_step < 660


@pytest.mark.parametrize("noise", [0.001, 0.003, 0.006])
def test_a_lasting_shift_of_three_percent_is_found_where_it_began(noise):
    ended = grade(loss=noisy([1.96] * 600 + [1.96 * 1.03] * 2000, noise=noise))
    assert only(ended).kind in (EpisodeKind.PARTIAL_RECOVERY, EpisodeKind.DIVERGED)
    assert abs(ended[0].onset_step - 600) <= 5
    assert ended[0].level_before == pytest.approx(1.96, rel=0.005)
    assert ended[0].level_after == pytest.approx(1.96 * 1.03, rel=0.005)


def test_a_three_percent_spike_that_settles_one_percent_high_never_recovered():
    marin = [1.96] * 600 + [2.02] * 40 + [1.98] * 1500
    episode = only(grade(loss=noisy(marin, noise=0.002)))
    assert episode.kind in (EpisodeKind.PARTIAL_RECOVERY, EpisodeKind.DIVERGED)
    assert abs(episode.onset_step - 600) <= 5


def test_a_tail_too_low_for_a_hit_is_lost_as_well():
    tail = [3.0] + [2.08] * 12
    episode = only(grade(loss=with_spike(CALM, tail)))
    assert episode.kind is EpisodeKind.FAST_RECOVERY
    assert abs(episode.steps_lost - 13) <= 2


def test_a_level_hardly_above_the_noise_is_not_regained():
    lasting = [3.0, *noisy([2.035] * 1500, seed=5)]
    assert only(grade(loss=with_spike(CALM, lasting, length=1900))).kind is (
        EpisodeKind.PARTIAL_RECOVERY
    )
    passing = lasting[:81]
    episode = only(grade(loss=with_spike(CALM, passing, length=1900)))
    assert episode.kind is EpisodeKind.SLOW_RECOVERY
    assert 60 <= episode.steps_lost <= 100


def test_a_climb_to_the_peak_is_no_rise_after_it():
    climb = [2.6 + 0.06 * index for index in range(90)]
    episode = only(grade(loss=with_spike(CALM, noisy(climb + [4.0] * 900), length=1290)))
    assert episode.kind is EpisodeKind.PARTIAL_RECOVERY


def test_a_shift_that_goes_back_is_one_recovery():
    shifted = noisy([2.0] * 600 + [2.08] * 40 + [2.0] * 600, noise=0.004)
    episode = only(grade(loss=shifted))
    assert episode.kind is EpisodeKind.FAST_RECOVERY
    assert abs(episode.onset_step - 600) <= 3
    assert abs(episode.end_step - 639) <= 3


def test_a_rise_does_not_begin_before_the_episode_that_ended():
    ramp = noisy([2.0] * 400 + [2.0 + 0.0004 * index for index in range(800)])
    ramp[480:483] = [4.0] * 3
    grader, ended = Grader(), []
    for step, loss in enumerate(ramp):
        ended += grader.saw(step, {"loss": loss})
        grader = (
            Grader.restore(json.loads(json.dumps(grader.snapshot()))) if step == 510 else grader
        )
    spike, rise = ended + grader.finish()
    assert (spike.kind, spike.onset_step) == (EpisodeKind.FAST_RECOVERY, 480)
    assert rise.kind is EpisodeKind.DIVERGED
    assert spike.end_step < rise.onset_step < 600


def test_the_new_level_is_judged_soon():
    series = noisy([2.0] * 300 + [5.0] + [2.3] * 700)
    series[300 + GIVE_UP_STEPS + 40] = 4.0
    first, second = grade(loss=series)
    assert first.kind is EpisodeKind.PARTIAL_RECOVERY
    assert (second.onset_step, second.steps_lost) == (300 + GIVE_UP_STEPS + 40, 1)


def test_a_divergence_that_goes_on_is_one_episode():
    series = [2.0] * 400 + [2.0 + 0.01 * index for index in range(6000)]
    assert only(grade(loss=noisy(series))).kind is EpisodeKind.DIVERGED


def test_the_level_after_a_divergence_is_the_next_baseline():
    series = noisy([2.0] * 400 + [8.0] * 2000)
    series[2000] = 30.0
    first, second = grade(loss=series)
    assert first.kind is EpisodeKind.DIVERGED
    assert (second.kind, second.onset_step) == (EpisodeKind.DATA_OUTLIER, 2000)
    assert second.level_before == pytest.approx(8.0, rel=0.01)


def test_spikes_apart_are_episodes_of_their_own():
    series = noisy([2.0] * 800)
    for at in (300, 400, 500):
        series[at : at + 4] = [3.0, 3.5, 3.0, 2.8]
    assert [(e.kind, e.onset_step) for e in grade(loss=series)] == [
        (EpisodeKind.FAST_RECOVERY, at) for at in (300, 400, 500)
    ]


def test_hits_closer_than_the_quiet_steps_are_one_episode():
    series = noisy([2.0] * 600)
    for at in (300, 300 + QUIET_STEPS - 2, 300 + 2 * (QUIET_STEPS - 2)):
        series[at] = 3.0
    episode = only(grade(loss=series))
    assert (episode.onset_step, episode.end_step) == (300, 300 + 2 * (QUIET_STEPS - 2))


def test_a_sudden_drop_is_no_instability():
    assert grade(loss=noisy([4.0] * 400 + [4.0 - 0.025 * i for i in range(60)] + [2.5] * 800)) == []


def test_a_steady_descent_is_no_instability():
    assert grade(loss=noisy([2.0 + 8.0 * math.exp(-i / 300) for i in range(4000)])) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_healthy_run_has_no_episode(seed):
    quiet = noisy([3.0 - i / 8000 for i in range(5000)], noise=0.02, seed=seed)
    batch_of_one = noisy([3.0] * 5000, noise=0.25, seed=seed)
    assert grade(loss=quiet, grad_norm=noisy([0.4] * 5000, noise=0.08, seed=seed + 50)) == []
    assert grade(loss=batch_of_one) == []


def test_noise_that_reaches_as_far_down_is_no_instability():
    rng = random.Random(3)
    tails = [
        3.0 + rng.choice([-1, 1]) * (0.02 if rng.random() < 0.85 else 0.6) for _ in range(3000)
    ]
    assert grade(loss=tails) == []


def test_a_loss_around_zero_has_no_ratio_to_judge_by():
    rng = random.Random(4)
    surrogate = [rng.gauss(0.0, 0.02) for _ in range(3000)]
    assert grade(loss=surrogate) == []
    assert grade(loss=[value - 0.5 for value in surrogate]) == []
    surrogate[1000] = 0.16
    surrogate[2000:2010] = [3.0] * 10
    assert only(grade(loss=surrogate)).onset_step == 2000


def test_a_policy_gradient_loss_may_drift():
    rng = random.Random(6)
    drift = [rng.gauss(0.2 * min(index / 1500, 1.0) - 0.5, 0.02) for index in range(3000)]
    assert grade(loss=drift) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_of_two_modes_is_no_instability(seed):
    rng = random.Random(seed)
    shares = [rng.betavariate(0.4, 0.4) for _ in range(4000)]
    mixup = [1.2 + 4.0 * min(share, 1 - share) + rng.gauss(0, 0.05) for share in shares]
    assert grade(loss=mixup) == []


def test_a_loss_stuck_at_zero_is_not_judged():
    assert grade(loss=[0.0] * 300 + [0.1] + [0.0] * 100) == []


def test_the_first_values_are_muted():
    assert grade(loss=[11.0, 69.0, 40.0, *noisy([9.0] * 200)]) == []


def test_a_band_judges_from_its_fiftieth_value():
    series = noisy([2.0] * 200)
    series[45] = series[75] = 3.0
    assert [e.onset_step for e in grade(loss=series)] == [75]


def test_a_young_band_is_wide_enough_for_its_noise():
    for seed in range(300):
        assert grade(loss=noisy([2.0] * 110, noise=0.02, seed=seed)) == []


@pytest.mark.parametrize("width", [1, 2])
def test_a_hard_batch_on_a_healthy_model_is_a_data_outlier(width):
    norms = noisy([0.4] * 500, noise=0.03)
    norms[CALM] *= 1.3
    episode = only(grade(loss=with_spike(CALM, [4.6] * width), grad_norm=norms))
    assert episode.kind is EpisodeKind.DATA_OUTLIER
    assert episode.steps_lost == width
    assert episode.leads == {}


def test_a_single_high_loss_with_a_lead_signal_is_no_data_outlier():
    norms = noisy([0.4] * 500, noise=0.03)
    norms[CALM + 1] = 4.0
    episode = only(grade(loss=with_spike(CALM, [4.6]), grad_norm=norms))
    assert episode.kind is EpisodeKind.FAST_RECOVERY
    assert episode.leads == {"grad_norm": -1}


def test_a_lead_signal_alone_is_a_precursor():
    update, norms = noisy([1.0] * 500, noise=0.03), noisy([0.4] * 500, noise=0.03, seed=2)
    update[300:304] = [2.2, 2.5, 2.5, 2.2]
    norms[302:304] = [1.5, 1.4]
    episode = only(grade(loss=noisy([2.0] * 500), update_norm=update, grad_norm=norms))
    assert episode.kind is EpisodeKind.PRECURSOR
    assert (episode.onset_step, episode.end_step, episode.steps_lost) == (300, 303, 4)
    assert episode.leads == {"update_norm": 0, "grad_norm": 2}


def test_leads_count_the_steps_before_the_loss():
    update, norms = noisy([1.0] * 500, noise=0.03), noisy([0.4] * 500, noise=0.03, seed=2)
    moment, scale = noisy([0.1] * 500, noise=0.03, seed=3), [65536.0] * 500
    update[296:304] = [2.2] * 8
    norms[300:304] = [1.5] * 4
    scale[270:] = [16384.0] * 230
    episode = only(
        grade(
            loss=with_spike(CALM, [3.0, 4.0, 3.0]),
            update_norm=update,
            grad_norm=norms,
            exp_avg_norm=moment,
            loss_scale=scale,
        )
    )
    assert episode.kind is EpisodeKind.FAST_RECOVERY
    assert episode.leads == {"update_norm": 4, "grad_norm": 0, "loss_scale": 30}


def test_a_lead_signal_that_was_back_long_before_did_not_lead():
    norms = noisy([0.4] * 500, noise=0.03)
    norms[CALM - 15] = 4.0
    episode = only(grade(loss=with_spike(CALM, [3.0]), grad_norm=norms))
    assert (episode.kind, episode.leads) == (EpisodeKind.DATA_OUTLIER, {})


def test_a_lead_is_counted_from_the_run_that_led():
    norms = noisy([0.4] * 500, noise=0.03)
    norms[CALM - 30] = norms[CALM - 15] = norms[CALM - 2] = norms[CALM - 1] = 4.0
    assert only(grade(loss=with_spike(CALM, [3.0]), grad_norm=norms)).leads == {"grad_norm": 2}


def test_a_long_precursor_does_not_shorten_the_wait_for_a_recovery():
    norms = noisy([0.4] * 300 + [4.0] * 400 + [0.4] * 700, noise=0.03)
    losses = noisy([2.0] * 650 + [4.0] * 250 + [2.0] * 500)
    episode = only(grade(loss=losses, grad_norm=norms))
    assert (episode.kind, episode.steps_lost) == (EpisodeKind.SLOW_RECOVERY, 250)
    assert episode.leads == {"grad_norm": 350}


def test_a_halved_loss_scale_is_routine():
    assert grade(loss=noisy([2.0] * 500), loss_scale=[65536.0] * 300 + [32768.0] * 200) == []


@pytest.mark.parametrize("every", [1, 7])
def test_a_lead_signal_on_a_new_level_is_one_precursor(every):
    grader, ended = Grader(), []
    norms = noisy([0.4] * 1000 + [4.0] * 3000, noise=0.03)
    for step, loss in enumerate(noisy([2.0] * 4000)):
        seen = {"loss": loss} if step % every else {"loss": loss, "grad_norm": norms[step]}
        ended += grader.saw(step, seen)
    episode = only(ended + grader.finish())
    assert episode.kind is EpisodeKind.PRECURSOR
    assert 1000 <= episode.onset_step < 1000 + every
    assert GIVE_UP_STEPS - every < episode.steps_lost <= GIVE_UP_STEPS + 1


def test_one_nan_is_one_episode_and_enters_no_past():
    series = noisy([2.0] * 600)
    series[CALM] = math.nan
    grader = Grader()
    episode = only(grade(grader=grader, loss=series))
    assert episode.kind is EpisodeKind.NON_FINITE
    assert (episode.onset_step, episode.end_step, episode.steps_lost) == (CALM, CALM, 1)
    assert "NaN" not in json.dumps(grader.snapshot())
    assert (
        only(grade(grader=grader, loss=[4.0, *noisy([2.0] * 40)])).kind is EpisodeKind.DATA_OUTLIER
    )


def test_nan_for_a_thousand_steps_is_one_episode():
    episode = only(grade(loss=noisy([2.0] * 300) + [math.nan] * 1000))
    assert episode.kind is EpisodeKind.NON_FINITE
    assert (episode.peak, episode.level_after, episode.steps_lost) == (None, None, 1000)


def test_a_lead_signal_that_is_never_finite_is_told_once():
    first, second = grade(
        loss=with_spike(2000, [4.0, 4.0, 4.0], length=2200), grad_norm=[math.inf] * 2200
    )
    assert (first.kind, first.onset_step) == (EpisodeKind.NON_FINITE, 0)
    assert (second.kind, second.onset_step) == (EpisodeKind.FAST_RECOVERY, 2000)


def test_a_spike_that_ends_in_nan_is_non_finite():
    episode = only(grade(loss=noisy([2.0] * 300) + [4.0, 6.0, 9.0] + [math.nan] * 30))
    assert (episode.kind, episode.onset_step, episode.peak) == (EpisodeKind.NON_FINITE, 300, 9.0)
    assert episode.level_after is None


def test_a_level_change_the_job_declared_is_no_instability():
    grader, ended = Grader(), []
    for step, loss in enumerate(noisy([2.0] * 400 + [3.0] * 800)):
        ended += grader.saw(step, {"loss": loss, "grad_norm": loss}, declared=step == 400)
    assert ended + grader.finish() == []


def test_a_declared_change_ends_what_is_open():
    grader, ended = Grader(), []
    for step, loss in enumerate(noisy([2.0] * 400 + [5.0] * 10 + [3.0] * 300)):
        ended += grader.saw(step, {"loss": loss}, declared=step == 410)
    assert only(ended + grader.finish()).kind is EpisodeKind.DIVERGED
    assert (ended[0].onset_step, ended[0].end_step, ended[0].steps_lost) == (400, 409, 10)


def test_a_vetoed_outlier_is_a_short_episode_and_enters_no_past():
    grader, ended = Grader(), []
    norms = [4.0 if step == 300 else 0.4 for step in range(400)]
    for step, loss in enumerate(with_spike(CALM, [5.0], length=400)):
        ended += grader.saw(step, {"loss": loss, "grad_norm": norms[step]}, vetoed=step == CALM)
    episode = only(ended + grader.finish())
    assert (episode.kind, episode.steps_lost) == (EpisodeKind.FAST_RECOVERY, 1)
    before = Grader()
    grade(grader=before, loss=noisy([2.0] * 200))
    held = before.snapshot()["levels"]
    before.saw(200, {"loss": 2.01}, vetoed=True)
    assert before.snapshot()["levels"] == held


def test_steps_repeated_after_a_rollback_are_lost():
    grader, ended = Grader(), []
    healthy = noisy([2.0] * 600)
    for step, loss in [*enumerate([*healthy[:300], *[4.0] * 5]), *enumerate(healthy[290:], 290)]:
        ended += grader.saw(step, {"loss": loss})
    assert [e.steps_lost for e in ended] == [5]
    again = Grader()
    steps = [*range(305), *range(295, 600)]
    high = [*healthy[:300], *[4.0] * 10, *healthy[:300]]
    ended = [
        e for step, loss in zip(steps, high, strict=True) for e in again.saw(step, {"loss": loss})
    ]
    assert [(e.onset_step, e.end_step, e.steps_lost) for e in ended] == [(300, 299, 10)]


def dataset_spike(where: Mapping[str, int]) -> list[Episode]:
    losses = {
        name: noisy([level] * 500, seed=seed)
        for name, level, seed in (
            ("loss", 2.0, 1),
            ("dataset_cm4", 3.0, 2),
            ("dataset_pmd", 1.0, 3),
        )
    }
    for name, at in where.items():
        losses[name][at : at + 3] = [value * 1.6 for value in losses[name][at : at + 3]]
    return grade(**losses)


def test_an_episode_names_the_datasets_that_left_their_band():
    assert only(dataset_spike({"loss": 300, "dataset_cm4": 300})).datasets == ("cm4",)
    both = dataset_spike({"loss": 300, "dataset_pmd": 300, "dataset_cm4": 301})
    assert only(both).datasets == ("cm4", "pmd")
    assert only(dataset_spike({"loss": 300})).datasets == ()


def test_a_spike_of_one_dataset_that_the_loss_hides_is_an_episode():
    episode = only(dataset_spike({"dataset_pmd": 300}))
    assert (episode.kind, episode.datasets) == (EpisodeKind.FAST_RECOVERY, ("pmd",))
    assert (episode.onset_step, episode.end_step) == (300, 302)
    assert episode.level_before == pytest.approx(1.0, rel=0.02)


def test_a_dataset_without_a_sample_is_no_nan():
    names = [math.nan if step % 3 else 3.0 for step in range(500)]
    assert grade(loss=noisy([2.0] * 500), dataset_cm4=names) == []


def test_a_log_without_a_loss_gets_precursors_and_non_finite_only():
    norms = noisy([0.4] * 800, noise=0.03)
    norms[300:303] = [4.0] * 3
    norms[500] = math.inf
    precursor, broken = grade(grad_norm=norms)
    assert (precursor.kind, precursor.onset_step) == (EpisodeKind.PRECURSOR, 300)
    assert (precursor.peak, precursor.level_before, precursor.level_after) == (None, None, None)
    assert (broken.kind, broken.onset_step) == (EpisodeKind.NON_FINITE, 500)


def test_the_spike_of_bloom_176b_recovers_fast_and_is_led_by_the_grad_norm():
    grader = Grader()
    calm = 300
    grade(
        grader=grader,
        first=31214 - calm,
        loss=noisy([2.21] * calm, noise=0.008),
        grad_norm=noisy([0.23] * calm, noise=0.05, seed=2),
    )
    ended = [
        e
        for step, loss, norm in BLOOM_176B
        for e in grader.saw(step, {"loss": loss, "grad_norm": norm})
    ]
    episode = only(ended + grader.finish())
    assert episode.kind is EpisodeKind.FAST_RECOVERY
    assert (episode.onset_step, episode.peak_step, episode.end_step) == (31216, 31219, 31222)
    assert (episode.peak, episode.steps_lost) == (5.098124, 7)
    assert episode.leads == {"grad_norm": 1}


def test_a_log_that_ends_high_has_diverged():
    assert only(grade(loss=noisy([2.0] * 300) + [4.0] * 30)).kind is EpisodeKind.DIVERGED


def test_a_snapshot_of_another_version_is_refused():
    with pytest.raises(ValueError, match="version 0"):
        Grader.restore({**Grader().snapshot(), "version": 0})


@pytest.mark.parametrize("draw", [lambda r: r.gauss(2, 0.1), lambda r: r.choice([1.0, 2.0, 9.0])])
def test_the_spread_is_the_mad(draw: Callable[[random.Random], float]):
    rng, band = random.Random(5), Band(1.05)
    for _ in range(250):
        band.push(draw(rng))
        center = sorted(band.order)[len(band.order) // 2]
        off = sorted(abs(value - center) for value in band.order)
        assert band.spread() == 1.4826 * max(off[len(off) // 2], 0.002 * center)
