"""Ladders, budgets and what makes a rule stop."""

import math

from drive import Job

from trimtab.controller.engine.model import Action, Mode, Outcome, VerdictKind
from trimtab.controller.engine.rule import Phase
from trimtab.controller.engine.snapshot import adopt
from trimtab.controller.loader import parse_policy

LADDER = """
version: 1
defaults: {after: 0, recover_within: 10 steps}
rules:
  - name: loud
    when: loss > 2 * median(loss, 16)
    do: skip_batch
    limit: 2 per 100 steps
    ladder:
      - {scale_lr: {by: 0.5, over: 50 steps}, limit: 1 per 100 steps}
      - rollback: {skip: 10 batches, soak: 5 steps}
"""


def loud(job: Job, times: int) -> None:
    for _ in range(times):
        job.step(loss=9.0)


def test_a_ladder_climbs_when_the_limit_of_a_rung_is_spent() -> None:
    job = Job(LADDER)
    job.calm(50)
    loud(job, 5)
    actions = [(d.step, d.action, d.rung) for d in job.decisions()]
    assert actions == [
        (50, Action.SKIP_BATCH, 0),
        (51, Action.SKIP_BATCH, 0),
        (52, Action.SCALE_LR, 1),
        (53, Action.ROLLBACK, 2),
        (45, Action.ALERT, 3),  # five clean steps before the onset, and it is as loud there
    ]
    assert [climb.rung for climb in job.climbs()] == [1, 2, 3]
    assert job.climbs()[0].reason == "its limit is spent"


def test_a_spent_ladder_says_structural_and_never_acts_again() -> None:
    job = Job(LADDER)
    job.calm(50)
    loud(job, 5)
    assert job.decisions()[-1].evidence[0].startswith("structural")
    before = len(job.decisions())
    job.calm(2000)
    loud(job, 20)
    assert len(job.decisions()) == before
    [rule] = job.state.policy.rules
    assert job.state.rules["loud"].phase(rule, job.state.tick) is Phase.SPENT
    assert job.verdicts[-1].kind is VerdictKind.APPLY


def test_a_spent_ladder_begins_again_under_another_policy_and_only_then() -> None:
    job = Job(LADDER)
    job.calm(50)
    loud(job, 5)
    same = adopt(job.state, job.state.policy)
    other = adopt(job.state, parse_policy(LADDER + "# looked at\n", "test.yaml"))
    assert same.rules["loud"].rung == 3
    assert other.rules["loud"].rung == 0


def test_a_ladder_climbs_when_recovery_does_not_come_in_time() -> None:
    job = Job(LADDER)
    job.calm(50)
    loud(job, 1)
    job.calm(12, loss=2.4)  # above the band, below the rule
    [climb] = job.climbs()
    assert (climb.step, climb.rung) == (60, 1)
    assert climb.reason == "no recovery by recover_within"
    loud(job, 1)
    assert job.decisions()[-1].action is Action.SCALE_LR


def test_two_interventions_that_did_not_help_are_one_climb_of_their_rung() -> None:
    job = Job(LADDER)
    job.calm(50)
    loud(job, 2)
    job.calm(20, loss=2.4)
    assert [climb.rung for climb in job.climbs()] == [1]


def test_a_ladder_climbs_when_the_job_refuses() -> None:
    job = Job(LADDER, answering=False)
    job.calm(50)
    loud(job, 3)
    job.answer(job.directives[0], Outcome.REFUSED)
    assert [climb.rung for climb in job.climbs()] == [1, 2]
    assert job.climbs()[-1].reason == "scale_lr: refused"


def test_a_ladder_goes_back_when_all_was_calm_for_as_long_as_its_limit_looks_back() -> None:
    job = Job(LADDER)
    job.calm(50)
    loud(job, 3)
    job.calm(99, seed=1)
    assert job.state.rules["loud"].rung == 1
    job.calm(2, seed=2)
    assert job.state.rules["loud"].rung == 0
    loud(job, 1)
    assert job.decisions()[-1].action is Action.SKIP_BATCH


def test_a_rule_without_a_ladder_waits_for_its_limit() -> None:
    job = Job(LADDER.split("    ladder", maxsplit=1)[0])
    job.calm(50)
    loud(job, 5)
    assert job.vetoes() == [50, 51]
    assert job.climbs() == []
    job.calm(97, seed=1)
    loud(job, 1)
    assert job.vetoes()[-1] == 152


LIMITS = """
version: 1
defaults: {after: 0}
limits: {run: 3 per 100 steps, causes: {data: 2 per 100 steps}}
rules:
  - name: loud
    when: loss > 5
    do: skip_batch
    labels: {cause: data}
  - name: steep
    when: grad_norm > 5
    do: skip_batch
    labels: {cause: data}
  - name: fast
    when: lr > 5
    do: skip_batch
  - name: seen
    when: loss > 5
    do: skip_batch
    mode: observe
"""


def test_rules_of_one_cause_share_its_budget_and_all_rules_that_of_the_run() -> None:
    # Else alternating causes evade a budget per rule.
    job = Job(LIMITS)
    job.calm(10, loss=1.0, grad_norm=1.0, lr=1.0)
    job.step(loss=9.0, grad_norm=1.0, lr=1.0)
    job.step(loss=1.0, grad_norm=9.0, lr=1.0)
    job.step(loss=9.0, grad_norm=1.0, lr=1.0)
    job.step(loss=1.0, grad_norm=9.0, lr=1.0)
    assert job.vetoes() == [10, 11]
    job.step(loss=1.0, grad_norm=1.0, lr=9.0)
    job.step(loss=1.0, grad_norm=1.0, lr=9.0)
    assert job.vetoes() == [10, 11, 14]
    assert job.state.counts["over_budget", "fast"] == 1
    job.calm(95, loss=1.0, grad_norm=1.0, lr=1.0)
    job.step(loss=9.0, grad_norm=1.0, lr=1.0)
    assert job.vetoes()[-1] == 111


def test_one_old_table_keeps_the_budgets_of_causes_and_run() -> None:
    job = Job(LIMITS)
    job.calm(10, loss=1.0, grad_norm=1.0, lr=1.0)
    job.cut_off()
    for _ in range(3):
        job.step(loss=9.0, grad_norm=1.0, lr=1.0)
        job.step(loss=1.0, grad_norm=9.0, lr=1.0)
    for _ in range(3):
        job.step(loss=1.0, grad_norm=1.0, lr=9.0)
    assert job.vetoes() == [10, 11, 16]


def test_what_only_observes_spends_nothing_of_the_budgets() -> None:
    job = Job(
        LIMITS.replace(
            "do: skip_batch\n    labels", "do: skip_batch\n    mode: observe\n    labels"
        )
    )
    job.calm(10, loss=1.0, grad_norm=1.0, lr=1.0)
    for _ in range(5):
        job.step(loss=9.0, grad_norm=9.0, lr=1.0)
    assert job.vetoes() == []
    for _ in range(4):
        job.step(loss=1.0, grad_norm=1.0, lr=9.0)
    assert len(job.vetoes()) == 3
    assert sum(d.rule == "loud" and d.mode is Mode.OBSERVE for d in job.decisions()) == 5


def test_vetoes_in_a_row_are_bounded_also_for_a_rule_without_a_past() -> None:
    job = Job(
        "version: 1\ndefaults: {after: 0, limit: 500 per 1000 steps}\nrebaseline: 6 steps\n"
        "limits: {run: 500 per 1000 steps}\n"
        "rules: [{name: high, when: loss > 5, do: skip_batch}]\n"
    )
    for _ in range(40):
        job.step(loss=9.0)
    applied = [at for at in range(40) if at not in job.vetoes()]
    assert applied == [6, 13, 20, 27, 34]


def test_nan_without_end_ends_in_an_alert_once() -> None:
    job = Job(LADDER + "rebaseline: 6 steps\n")
    job.calm(50)
    for _ in range(30):
        job.step(loss=math.nan)
    alerts = [d for d in job.decisions() if d.action is Action.ALERT]
    assert [(d.rule, d.step) for d in alerts] == [("reflex", 55)]
    assert all(v.kind is VerdictKind.VETO for v in job.verdicts[50:])


def test_a_factor_below_the_floor_is_refused_before_it_is_sent() -> None:
    job = Job(
        "version: 1\ndefaults: {after: 0}\n"
        "rules: [{name: high, when: loss > 5, do: {scale_lr: {by: 0.1}}}]\n"
    )
    for _ in range(4):
        job.step(loss=9.0)
    assert math.isclose(job.lr_factor, 0.01)
    assert len(job.directives) == 2
    refused = [r for r in job.records if getattr(r, "outcome", None) is Outcome.REFUSED]
    assert "least is 0.01" in refused[0].detail  # type: ignore[union-attr]
