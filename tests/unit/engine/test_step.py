"""What the engine decides, and what it must never do."""

import math
from dataclasses import replace

from drive import SCALARS, SKIP_LOUD_LOSS, Job

from trimtab.controller.engine.model import (
    NO_TABLE,
    REFLEX,
    Action,
    Layout,
    Mode,
    Observation,
    Outcome,
    Rebaselined,
    Registered,
    Verdict,
    VerdictKind,
)
from trimtab.controller.engine.step import step


def test_a_loud_batch_is_vetoed_before_it_is_applied_and_no_other() -> None:
    job = Job()
    job.calm(100)
    job.step(loss=5.0)
    job.calm(100, seed=1)
    assert job.vetoes() == [100]
    [decision] = job.decisions()
    assert (decision.rule, decision.action, decision.step) == ("loud-loss", "skip_batch", 100)
    assert decision.evidence[0].startswith("loss = 5 > 2 * median(loss, 16) = ")
    assert job.outcomes() == {decision.id: Outcome.RECOVERED}
    assert job.state.counts["verdict_mismatch",] == 0


def test_an_intervention_after_which_the_loss_stays_high_has_not_helped() -> None:
    job = Job()
    job.calm(100)
    job.step(loss=5.0)
    job.calm(60, loss=2.5)  # above the band, below the rule
    assert set(job.outcomes().values()) == {Outcome.NOT_RECOVERED}


def test_without_a_loss_the_outcome_is_unknown_never_good() -> None:
    job = Job(SKIP_LOUD_LOSS.replace("loss > 2 * median(loss, 16)", "grad_norm > 9"))
    job.calm(50, grad_norm=1.0)
    job.step(grad_norm=10.0)
    job.calm(60, grad_norm=1.0)
    assert set(job.outcomes().values()) == {Outcome.UNKNOWN}


def test_equal_outliers_do_not_mask_one_another() -> None:
    # The published skip-step rule (128, 6 sigma) lets the fifth of equal outliers pass.
    job = Job(SKIP_LOUD_LOSS.replace("loss > 2 * median(loss, 16)", "zscore(loss, 128) > 6"))
    job.calm(200)
    for _ in range(12):
        job.step(loss=10.0)
    assert job.vetoes() == list(range(200, 212))


def test_one_nan_is_vetoed_and_changes_nothing_afterwards() -> None:
    job, twin = Job(), Job()
    for each in (job, twin):
        each.calm(100)
    assert job.step(loss=math.nan).rule == REFLEX
    job.step_number -= 1
    job.calm(50, seed=1)
    twin.calm(50, seed=1)
    assert job.vetoes() == [100]
    assert job.state.terms == twin.state.terms


def test_nan_without_end_is_vetoed_without_end() -> None:
    job = Job()
    job.calm(100)
    for _ in range(50):
        assert job.step(loss=math.inf).kind is VerdictKind.VETO
    assert not any(isinstance(record, Rebaselined) for record in job.records)


def test_a_level_that_lasts_is_accepted_after_rebaseline_steps_and_says_so() -> None:
    job = Job(SKIP_LOUD_LOSS + "rebaseline: 10 steps\n")
    job.calm(100)
    job.calm(100, loss=6.0)
    assert job.vetoes() == list(range(100, 110))
    [event] = [record for record in job.records if isinstance(record, Rebaselined)]
    assert (event.seq, event.flagged_steps) == (109, 10)
    job.step(loss=15.0)  # guarded again, at the new level
    assert job.vetoes()[-1] == 200


def test_a_late_table_still_guards_and_its_budget_bounds_the_vetoes() -> None:
    job = Job(SKIP_LOUD_LOSS + "rebaseline: 10 steps\n", lag=5)
    job.calm(100)
    for _ in range(40):
        job.step(loss=6.0)
    assert job.vetoes()[0] == 100
    assert len(job.vetoes()) == 10  # vetoes that an old table does not know count against it too


def test_a_table_that_never_renews_expires_and_leaves_the_reflex() -> None:
    job = Job(SKIP_LOUD_LOSS + "expires: 20 steps\n")
    job.calm(100)
    table = job.state.table
    job.cut_off()
    job.calm(20)
    assert job.verdicts[-1].table_seq == table.seq
    job.step(loss=5.0)
    assert job.verdicts[-1] == Verdict()
    job.step(loss=math.nan)
    assert job.verdicts[-1] == Verdict(kind=VerdictKind.VETO, rule=REFLEX, table_seq=NO_TABLE)


def test_one_table_gives_no_more_vetoes_than_its_rules_limit_leaves() -> None:
    job = Job(SKIP_LOUD_LOSS.replace("100 per 1000", "5 per 1000"))
    job.calm(100)
    job.step(loss=9.0)
    job.step(loss=9.0)
    job.cut_off()
    for _ in range(20):
        job.step(loss=9.0)
    assert job.vetoes() == [100, 101, 102, 103, 104]


def test_one_table_gives_no_more_vetoes_in_all_than_rebaseline_leaves() -> None:
    job = Job(SKIP_LOUD_LOSS + "rebaseline: 10 steps\n")
    job.calm(100)
    for _ in range(4):
        job.step(loss=9.0)
    job.cut_off()
    for _ in range(20):
        job.step(loss=9.0)
    assert job.vetoes() == [*range(100, 110)]


def test_of_two_rules_that_hold_the_first_vetoes_and_the_second_has_not_missed_it() -> None:
    second = "  - name: louder\n    when: loss > 3 * median(loss, 16)\n    do: skip_batch\n"
    job = Job(SKIP_LOUD_LOSS + second)
    job.calm(100)
    job.step(loss=9.0)
    assert [(d.rule, d.seq) for d in job.decisions()] == [("loud-loss", 100)]
    assert set(job.outcomes().values()) == {Outcome.PENDING}


def test_the_limit_of_a_rule_is_never_exceeded() -> None:
    job = Job(SKIP_LOUD_LOSS.replace("100 per 1000", "3 per 50"))
    for _ in range(100):
        job.calm(3)
        job.step(loss=9.0)
    vetoes = job.vetoes()
    assert len(vetoes) > 10
    assert all(later - first >= 50 for first, later in zip(vetoes, vetoes[3:], strict=False))


def test_a_cooldown_keeps_the_rule_quiet() -> None:
    job = Job(SKIP_LOUD_LOSS + "    cooldown: 30 steps\n")
    job.calm(100)
    for _ in range(5):
        job.step(loss=9.0)
    job.calm(30)
    job.step(loss=9.0)
    assert job.vetoes() == [100, 135]


def test_after_leaves_the_warm_up_alone() -> None:
    job = Job(SKIP_LOUD_LOSS + "    after: 50 steps\n")
    job.calm(30)
    job.step(loss=9.0)
    job.calm(30)
    job.step(loss=9.0)
    assert job.vetoes() == [61]


def test_for_wants_matches_in_a_row() -> None:
    job = Job(SKIP_LOUD_LOSS + "    for: 3 steps\n")
    job.calm(50)
    for loss in (9.0, 9.0, 2.0, 9.0, 9.0, 9.0, 9.0):
        job.step(loss=loss)
    assert job.vetoes() == [55, 56]


def test_observe_writes_the_same_decisions_and_does_nothing() -> None:
    acting, observing = Job(), Job(SKIP_LOUD_LOSS + "    mode: observe\n")
    for job in (acting, observing):
        job.calm(100)
        job.step(loss=9.0)
        job.calm(20)
    assert [d.seq for d in observing.decisions()] == [d.seq for d in acting.decisions()]
    assert observing.decisions()[0].mode is Mode.OBSERVE
    assert observing.vetoes() == []
    assert observing.outcomes() == {}


def test_a_match_that_no_table_held_is_written_down_as_missed() -> None:
    job = Job()
    job.calm(100)
    seen = Observation(seq=100, step=100, values={"loss": 9.0}, verdict=Verdict())
    job.take(step(job.state, seen))
    assert set(job.outcomes().values()) == {Outcome.MISSED}


LR_JUMP = """
version: 1
defaults: {after: 0}
rules:
  - name: lr-jump
    when: lr > 3 * median(lr, 32)
    do:
      - skip_batch
      - scale_lr:
          by: median(lr, 32) / lr
          over: 100 steps
"""


def test_an_lr_jump_is_vetoed_and_undone_by_the_ratio_of_the_jump() -> None:
    job = Job(LR_JUMP)
    job.calm(50, loss=2.0, lr=1.0)
    job.step(loss=2.0, lr=8.0)
    [directive] = job.directives
    assert directive.action is Action.SCALE_LR
    assert math.isclose(directive.arguments["by"], 1 / 8, rel_tol=0.02)
    assert directive.arguments["over"] == 100
    job.calm(100, loss=2.0, lr=8.0 * job.lr_factor)
    assert len(job.directives) == 1
    assert set(job.outcomes().values()) == {Outcome.RECOVERED}


def test_one_directive_at_a_time_and_vetoes_until_it_is_answered() -> None:
    job = Job(LR_JUMP, answering=False)
    job.calm(50, loss=2.0, lr=1.0)
    for _ in range(4):
        job.step(loss=2.0, lr=8.0)
    assert len(job.directives) == 1
    assert job.vetoes() == [50, 51, 52, 53]
    job.answer(job.directives[0], Outcome.REFUSED)
    job.step(loss=2.0, lr=8.0)
    assert len(job.directives) == 2
    assert job.outcomes()[job.directives[0].id] is Outcome.REFUSED


def test_a_second_ack_of_a_directive_changes_nothing() -> None:
    job = Job(LR_JUMP)
    job.calm(50, loss=2.0, lr=1.0)
    job.step(loss=2.0, lr=8.0)
    records = list(job.records)
    job.answer(job.directives[0], Outcome.FAILED)
    assert job.records == records


def test_the_past_of_lr_scaled_signals_is_forgotten_when_the_factor_changes() -> None:
    # Else the end of a cut would look like a jump of lr and update_norm.
    job = Job(LR_JUMP)
    job.calm(50, loss=2.0, lr=0.1)
    job.lr_factor = 10.0
    job.calm(50, loss=2.0, lr=1.0)
    assert job.decisions() == []


def test_an_argument_that_is_not_sane_is_refused_not_sent() -> None:
    job = Job(LR_JUMP.replace("median(lr, 32) / lr", "lr / median(lr, 32)"))
    job.calm(50, loss=2.0, lr=1.0)
    job.step(loss=2.0, lr=8.0)
    assert job.directives == []
    assert Outcome.REFUSED in job.outcomes().values()


ROLL_BACK = """
version: 1
defaults: {after: 0, cooldown: 50 steps}
rules:
  - name: lost
    when: loss > 1.5 * median(loss, 32)
    for: 5 steps
    do:
      rollback: {skip: 10 batches, soak: 8 steps}
"""


def test_a_rollback_aims_before_the_onset_and_rewinds_the_past() -> None:
    job, twin = Job(ROLL_BACK), Job(ROLL_BACK)
    job.calm(60)
    job.calm(5, loss=4.0)
    [directive] = job.directives
    assert directive.arguments == {"skip": 10.0, "before_step": 52.0}
    twin.calm(52)
    assert job.state.terms == twin.state.terms
    job.calm(100)
    assert len(job.directives) == 1


def test_steps_that_go_back_are_a_resume() -> None:
    job, twin = Job(), Job()
    job.calm(100)
    job.step_number = 60
    job.step(loss=2.0)
    twin.calm(60)
    twin.step(loss=2.0)
    assert job.state.terms == twin.state.terms


def test_what_was_sent_again_counts_once() -> None:
    job = Job()
    job.calm(100)
    job.step(loss=9.0)
    again = Observation(seq=100, step=100, values={"loss": 9.0}, verdict=job.verdicts[-1])
    records = list(job.records)
    job.take(step(job.state, again))
    assert job.records == records


def test_a_restarted_job_keeps_the_past_and_closes_what_it_never_answered() -> None:
    job = Job(LR_JUMP, answering=False)
    job.calm(50, loss=2.0, lr=1.0)
    job.step(loss=2.0, lr=8.0)
    job.take(step(job.state, Registered(epoch=1, layout=Layout(signals=SCALARS))))
    assert job.outcomes()[job.directives[0].id] is Outcome.FAILED
    assert job.state.series["loss", False, False][0].values  # the past is still there
    assert job.state.table.epoch == 1


def test_an_lr_that_a_restart_sets_is_no_jump() -> None:
    job = Job(LR_JUMP)
    job.calm(50, loss=2.0, lr=0.1)
    job.take(step(job.state, Registered(epoch=1, layout=Layout(signals=SCALARS))))
    job.seq = 0
    job.calm(50, loss=2.0, lr=1.0)
    assert job.decisions() == []


def test_a_rule_whose_signal_is_not_measured_is_inactive() -> None:
    job = Job()
    job.take(step(job.state, Registered(epoch=1, layout=Layout(signals=("grad_norm",)))))
    assert job.state.inactive == {"loud-loss": frozenset({"loss"})}
    assert job.state.table.armed == ()


def test_a_verdict_that_the_table_does_not_give_is_counted() -> None:
    job = Job()
    job.calm(100)
    table = job.state.table
    wrong = Verdict(kind=VerdictKind.VETO, rule="loud-loss", table_seq=table.seq)
    seen = Observation(seq=100, step=100, values={"loss": 2.0}, verdict=wrong)
    job.take(step(job.state, seen))
    assert job.state.counts["verdict_mismatch",] == 1
    right = replace(seen, seq=101, step=101, verdict=Verdict(table_seq=100))
    job.take(step(job.state, right))
    assert job.state.counts["verdict_mismatch",] == 1
