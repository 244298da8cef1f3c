"""Keys of a rule, and kinds of signals: per layer group, per dataset, late, user-defined."""

import math

import pytest
from drive import SCALARS, SKIP_LOUD_LOSS, Job

from trimtab.controller.engine.model import (
    Action,
    Change,
    Layout,
    Outcome,
    Rebaselined,
    Registered,
    Verdict,
    VerdictKind,
)
from trimtab.controller.engine.step import step

GROUPS = ("embed", "blocks.0", "blocks.1", "head")
LAYOUT = Layout(
    signals=(*SCALARS, "reward", "dataset_loss[web]", "dataset_loss[code]"),
    layer_groups=GROUPS,
    layer_signals=("update_norm", "ratio_dip"),
)


def policy(when: str, do: str = "skip_batch", more: str = "", top: str = "") -> str:
    return (
        f"version: 1\ndefaults: {{after: 0, limit: 100 per 1000 steps}}\n{top}rules:\n"
        f"  - name: rule\n    when: {when}\n    do: {do}\n{more}"
    )


def job_of(when: str, do: str = "skip_batch", more: str = "", top: str = "") -> Job:
    return Job(policy(when, do, more, top), layout=LAYOUT)


def layers(job: Job, *norms: float, **values: float) -> Verdict:
    return job.take_step(values or {"loss": 2.0}, {"update_norm": norms})


def test_one_layer_out_of_its_own_band_is_enough_and_is_named() -> None:
    job = job_of("any_layer(update_norm > 2 * median(update_norm, 8))")
    for _ in range(10):
        layers(job, 1.0, 2.0, 3.0, 4.0)
    assert layers(job, 1.0, 2.0, 7.0, 4.0).rule == "rule"
    [decision] = job.decisions()
    assert decision.layers == ("blocks.1",)
    assert decision.evidence == ("update_norm = 7 > 2 * median(update_norm, 8) = 6 in blocks.1",)


def test_only_the_layer_that_matched_stays_out_of_its_past() -> None:
    job = job_of("any_layer(update_norm > 2 * median(update_norm, 8))", more="    mode: observe\n")
    for _ in range(10):
        layers(job, 1.0, 2.0, 3.0, 4.0)
    layers(job, 1.5, 2.0, 7.0, 4.0)
    found = job.state.series["update_norm", True, False]
    assert [len(series.values) for series in found] == [11, 11, 10, 11]


def test_a_layer_that_is_absent_matches_nothing() -> None:
    job = job_of("any_layer(not update_norm > 0.5)")
    assert layers(job, 1.0, math.nan, 1.0, 1.0).kind is VerdictKind.APPLY
    assert layers(job, 1.0, 0.1, 1.0, 1.0).kind is VerdictKind.VETO


def test_layers_restricts_a_rule_to_groups_by_pattern() -> None:
    job = job_of("any_layer(update_norm > 5)", more="    layers: ['blocks.*']\n")
    assert layers(job, 9.0, 1.0, 1.0, 9.0).kind is VerdictKind.APPLY
    assert layers(job, 9.0, 1.0, 6.0, 9.0).kind is VerdictKind.VETO
    assert job.decisions()[0].layers == ("blocks.1",)


def test_first_layers_looks_at_the_input_side_and_count_layers_counts() -> None:
    first, count = (
        job_of("first_layers(2, update_norm > 5)"),
        job_of("count_layers(update_norm > 5) >= 3"),
    )
    for job, kinds in ((first, "avv"), (count, "aav")):
        given = [layers(job, 1, 1, 9, 9), layers(job, 1, 9, 1, 9), layers(job, 1, 9, 9, 9)]
        assert "".join(verdict.kind.value[0] for verdict in given) == kinds


def test_a_job_without_layer_groups_makes_such_a_rule_inactive_and_says_so() -> None:
    job = Job(policy("any_layer(update_norm > 5)"))
    assert job.state.inactive == {"rule": frozenset({"update_norm per layer group"})}
    assert job.step(update_norm=9.0).kind is VerdictKind.APPLY


def test_a_spike_on_one_dataset_is_named() -> None:
    job = job_of("any_dataset(dataset_loss > 1.5 * median(dataset_loss, 8))")
    for _ in range(10):
        job.take_step({"dataset_loss[web]": 3.0, "dataset_loss[code]": 1.0}, {})
    job.take_step({"dataset_loss[code]": 1.2}, {})
    job.take_step({"dataset_loss[web]": 3.0, "dataset_loss[code]": 2.0}, {})
    assert [d.layers for d in job.decisions()] == [("code",)]


def test_a_late_signal_acts_a_step_later() -> None:
    job = job_of("ratio_dip > 0.1 and loss > 1")
    assert job.step(loss=2.0, ratio_dip=0.2).kind is VerdictKind.APPLY
    assert job.step(loss=2.0, ratio_dip=0.01).kind is VerdictKind.VETO
    assert job.step(loss=2.0).kind is VerdictKind.APPLY


def test_the_last_value_of_a_late_signal_holds_between_its_measurements_but_not_for_ever() -> None:
    job = job_of("ratio_dip > 0.1", do="alert")
    job.step(ratio_dip=0.2)
    for _ in range(150):
        job.step(loss=2.0)
    assert [d.seq for d in job.decisions()] == list(range(1, 101))


def test_a_user_defined_signal_is_declared_in_the_policy() -> None:
    job = job_of("reward < 0", top="signals: {reward: mean reward}\n")
    job.step(loss=1.0, reward=-1.0)
    assert job.step(loss=1.0, reward=1.0).kind is VerdictKind.VETO
    assert job.step(loss=1.0, reward=1.0).kind is VerdictKind.APPLY


@pytest.mark.parametrize("hold_off", ["{batch_size: 20 steps}", "20 steps"])
def test_a_declared_change_holds_a_rule_off_from_its_own_step_on(hold_off: str) -> None:
    job = job_of("loss > 5", more=f"    hold_off: {hold_off}\n", top="rearm_on: []\n")
    job.calm(30)
    job.take_step({"loss": 9.0}, {}, (Change.BATCH_SIZE,))
    for _ in range(20):
        job.step(loss=9.0)
    assert job.vetoes() == [50]


def test_a_change_that_is_not_named_holds_nothing_off() -> None:
    job = job_of("loss > 5", more="    hold_off: {data_mix: 20 steps}\n", top="rearm_on: []\n")
    job.take_step({"loss": 9.0}, {}, (Change.BATCH_SIZE,))
    assert job.vetoes() == [0]


def test_an_intervention_and_a_resume_hold_off_too() -> None:
    hold = "    hold_off: {intervention: 5 steps, resume: 8 steps}\n"
    job = job_of("loss > 5", more=hold)
    for _ in range(10):
        job.step(loss=9.0)
    assert job.vetoes() == [0, 5]
    job.take(step(job.state, Registered(epoch=1, layout=LAYOUT)))
    job.seq, job.verdicts, job.tables = 0, [], job.tables[-1:]
    for _ in range(10):
        job.step(loss=9.0)
    # The registration counts at the last step that was seen before it.
    assert job.vetoes() == [7]


def test_a_declared_batch_size_lets_the_past_start_anew_and_is_no_spike() -> None:
    job = Job(SKIP_LOUD_LOSS)
    job.calm(50)
    job.take_step({"loss": 9.0}, {}, (Change.BATCH_SIZE,))
    job.calm(50, loss=9.0)
    assert job.vetoes() == []
    job.step(loss=30.0)
    assert job.vetoes() == [101]


def test_a_declared_schedule_forgets_only_what_grows_with_the_lr() -> None:
    job = job_of("lr > 2 * median(lr, 8) or loss > 2 * median(loss, 8)")
    job.calm(20, loss=2.0, lr=1.0)
    job.take_step({"loss": 2.0, "lr": 5.0}, {}, (Change.LR_SCHEDULE,))
    assert job.vetoes() == []
    assert len(job.state.series["loss", False, False][0].values) == 21
    assert len(job.state.series["lr", False, False][0].values) == 1


def test_an_undeclared_level_is_accepted_signal_by_signal() -> None:
    job = Job(SKIP_LOUD_LOSS + "rebaseline: 4 steps\n")
    job.calm(50, loss=2.0, grad_norm=1.0)
    job.calm(10, loss=9.0, grad_norm=1.0)
    events = [r for r in job.records if isinstance(r, Rebaselined)]
    assert [(e.signal, e.step, e.flagged_steps) for e in events] == [("loss", 53, 4)]


CLIP = "{clip_update: {to: '1.5 * median(update_norm, 8)'}}"


def test_a_clip_scales_the_update_to_the_norm_that_the_rule_names() -> None:
    job = job_of("update_norm > 2 * median(update_norm, 8)", do=CLIP)
    for _ in range(10):
        job.step(loss=2.0, update_norm=1.0)
    verdict = job.step(loss=2.0, update_norm=6.0)
    assert verdict == Verdict(kind=VerdictKind.SCALE, rule="rule", scale=0.25, table_seq=9)
    [decision] = job.decisions()
    assert decision.action is Action.CLIP_UPDATE
    assert decision.arguments == {"to": 1.5, "scale": 0.25}
    assert job.outcomes() == {decision.id: Outcome.PENDING}
    assert job.state.counts["verdict_mismatch",] == 0


def test_an_update_below_the_norm_is_not_touched_and_nothing_is_missed() -> None:
    job = job_of("loss > 1", do="{clip_update: {to: 3}}")
    assert job.step(loss=2.0, update_norm=1.0).kind is VerdictKind.APPLY
    assert job.decisions() == []


@pytest.mark.parametrize("to", ["update_norm - 2", "lr - 1", "median(update_norm, 64)"])
def test_a_norm_that_is_not_sane_clips_nothing(to: str) -> None:
    job = job_of("loss > 1", do=f"{{clip_update: {{to: '{to}'}}}}")
    assert job.step(loss=2.0, update_norm=1.0, lr=0.5).kind is VerdictKind.APPLY


def test_a_clip_needs_the_update_norm() -> None:
    job = Job(policy("loss > 1", do="{clip_update: {to: 3}}"), layout=Layout(signals=("loss",)))
    assert job.state.inactive == {"rule": frozenset({"update_norm"})}


def test_the_matched_layers_go_into_the_options_of_a_reset() -> None:
    job = job_of(
        "any_layer(update_norm > 5)",
        do="{reset_moments: {layers: matched}}",
        more="    mode: observe\n",
    )
    layers(job, 9.0, 1.0, 9.0, 1.0)
    [decision] = job.decisions()
    assert decision.options == {"moments": "both", "layers": "embed,blocks.1"}


def test_a_decision_says_which_rules_were_close_and_carries_labels() -> None:
    more = (
        "    labels: {cause: data}\n"
        "  - name: near\n    when: grad_norm > 2 and loss > 1\n    do: alert\n"
        "  - name: far\n    when: grad_norm > 3\n    do: alert\n"
    )
    job = job_of("loss > 5", more=more)
    job.step(loss=9.0, grad_norm=1.9)
    [decision] = job.decisions()
    assert decision.close == ("near at 0.95 of its bound",)
    assert decision.labels == {"cause": "data"}


def test_a_score_of_logarithms_counts_factors() -> None:
    job = job_of("zscore(loss, 16, scale=log) > 4")
    job.calm(40)
    median = math.log(2.0)
    assert job.step(loss=math.exp(median) * 1.02).kind is VerdictKind.APPLY
    assert job.step(loss=4.0).kind is VerdictKind.VETO
    assert job.step(loss=-4.0).kind is VerdictKind.APPLY


def test_counters_count_the_pending_step_and_flagged_ones() -> None:
    job = job_of("consecutive(loss > 5) >= 3", do="alert")
    for loss in (9.0, 9.0, 1.0, 9.0, 9.0, 9.0, 9.0, 1.0):
        job.step(loss=loss)
    assert [d.seq for d in job.decisions()] == [5, 6]


def test_an_old_table_does_not_judge_by_rules_that_count_steps() -> None:
    job = job_of("count_true(loss > 5, 4) >= 2")
    job.step(loss=9.0)
    job.cut_off()
    job.step(loss=9.0)
    job.step(loss=9.0)
    assert job.vetoes() == [1]


def test_the_past_of_layers_is_forgotten_when_they_are_other_layers() -> None:
    job = job_of(
        "any_layer(update_norm > 2 * median(update_norm, 4)) or loss > 2 * median(loss, 4)"
    )
    for _ in range(5):
        layers(job, 1.0, 2.0, 3.0, 4.0)
    other = Layout(signals=SCALARS, layer_groups=("a",), layer_signals=("update_norm",))
    job.take(step(job.state, Registered(epoch=1, layout=other)))
    assert [s.values for s in job.state.series["update_norm", True, False]] == [[]]
    assert len(job.state.series["loss", False, False][0].values) == 5


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_a_rule_says_nothing_before_its_first_step(mode: str) -> None:
    job = job_of("loss > 1", more=f"    after: 5\n    mode: {mode}\n    cooldown: 0\n")
    for _ in range(8):
        job.step(loss=2.0)
    assert [decision.step for decision in job.decisions()] == [5, 6, 7]


@pytest.mark.parametrize(
    ("more", "top"),
    [
        ("    limit: 1 per 10 steps\n", ""),
        ("", "limits: {run: 1 per 10 steps}\n"),
        ("    labels: {cause: data}\n", "limits: {causes: {data: 1 per 10 steps}}\n"),
    ],
)
def test_a_limit_is_free_again_when_its_window_is_over(more: str, top: str) -> None:
    job = job_of("loss > 3", more=f"{more}    cooldown: 0\n    after: 5\n", top=top)
    for at in range(28):  # armed a step before: 11 steps hold both decisions of 10 apart
        job.step(loss=4.0 if at in (5, 16, 27) else 2.0)
    assert job.vetoes() == [5, 16, 27]


def test_an_lr_is_never_raised() -> None:
    job = job_of("lr > 1.5 * median(lr, 8)", do="\n      scale_lr:\n        by: lr / median(lr, 8)")
    for _ in range(10):
        job.step(lr=1.0)
    job.step(lr=2.0)
    [decision] = job.decisions()
    assert job.outcomes()[decision.id] is Outcome.REFUSED
    assert job.state.lr_factor == 1.0
