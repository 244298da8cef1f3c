"""/metrics: every label set from the start, the words of the policy, and no health when blind."""

import subprocess
import urllib.request
from shutil import which
from typing import Any

import prometheus_client
import pytest

from trimtab.controller.exporter import RunCollector, serve_metrics

STATUS: dict[str, Any] = {
    "run": "r",
    "epoch": 1,
    "seq": 9,
    "step": 7,
    "values": {"loss": 2.5, "nonfinite_count": 0.0},
    "lr_factor": 0.5,
    "counts": {
        ("decision", "spike", "skip_batch", "act"): 3,
        ("intervention", "spike", "skip_batch"): 2,
        ("outcome", "spike", "skip_batch", "recovered"): 1,
        ("verdict_mismatch",): 4,
        ("climb", "spike"): 5,
        ("over_budget", "spike"): 6,
        ("episode", "data_outlier"): 7,
    },
    "inactive": {"blind": ["grad_norm"]},
    "phases": {"spike": "cooling", "blind": "inactive"},
    "actions": [("spike", "skip_batch"), ("spike", "alert")],
    "modes": {"spike": "act", "blind": "act"},
    "policy_version": "abc",
    "last_observation_timestamp_s": 5.0,
    "connected": True,
    "journal_errors": 2,
    "journal_lag_steps": 1,
    "late_steps": 6,
    "unarmed_steps": 8,
}


def rendered(statuses: Any) -> str:
    registry = prometheus_client.CollectorRegistry()
    registry.register(RunCollector(statuses))
    return prometheus_client.generate_latest(registry).decode()


@pytest.mark.parametrize(
    "line",
    [
        "trimtab_up 1.0",
        "trimtab_runs 1.0",
        'trimtab_loss{run="r"} 2.5',
        'trimtab_nonfinite_gradient_elements{run="r"} 0.0',
        'trimtab_step{run="r"} 7.0',
        'trimtab_lr_factor{run="r"} 0.5',
        'trimtab_connected{run="r"} 1.0',
        'trimtab_last_observation_timestamp_seconds{run="r"} 5.0',
        'trimtab_journal_lag_steps{run="r"} 1.0',
        'trimtab_run_info{policy_version="abc",run="r"} 1.0',
        'trimtab_journal_errors_total{run="r"} 2.0',
        'trimtab_late_steps_total{run="r"} 6.0',
        'trimtab_unarmed_steps_total{run="r"} 8.0',
        'trimtab_verdict_mismatches_total{run="r"} 4.0',
        'trimtab_rebaselines_total{run="r"} 0.0',
        'trimtab_decisions_total{action="skip_batch",mode="act",rule="spike",run="r"} 3.0',
        'trimtab_decisions_total{action="alert",mode="act",rule="spike",run="r"} 0.0',
        'trimtab_decisions_total{action="skip_batch",mode="act",rule="reflex",run="r"} 0.0',
        'trimtab_interventions_total{action="skip_batch",rule="spike",run="r"} 2.0',
        'trimtab_interventions_total{action="skip_batch",rule="reflex",run="r"} 0.0',
        'trimtab_intervention_outcomes_total{action="skip_batch",outcome="recovered",rule="spike",'
        'run="r"} 1.0',
        'trimtab_intervention_outcomes_total{action="skip_batch",outcome="failed",rule="spike",'
        'run="r"} 0.0',
        'trimtab_rule_phase{phase="cooling",rule="spike",run="r"} 1.0',
        'trimtab_rule_phase{phase="spent",rule="spike",run="r"} 0.0',
        'trimtab_rule_inactive{rule="blind",run="r"} 1.0',
        'trimtab_rule_inactive{rule="spike",run="r"} 0.0',
        'trimtab_ladder_climbs_total{rule="spike",run="r"} 5.0',
        'trimtab_over_budget_total{rule="spike",run="r"} 6.0',
        'trimtab_episodes_total{kind="data_outlier",run="r"} 7.0',
        'trimtab_episodes_total{kind="diverged",run="r"} 0.0',
        'trimtab_rule_phase{phase="firing",rule="spike",run="r"} 0.0',
    ],
)  # fmt: skip
def test_a_runs_state_is_there(line: str) -> None:
    assert line in rendered(lambda: [STATUS]).splitlines()


def test_an_absent_signal_has_no_sample() -> None:
    assert 'trimtab_grad_norm{run="r"}' not in rendered(lambda: [STATUS])


def test_a_controller_that_does_not_answer_is_not_up() -> None:
    def broken() -> list[dict[str, Any]]:
        raise TimeoutError

    text = rendered(broken)
    assert "trimtab_up 0.0" in text
    assert "trimtab_step" not in text


@pytest.mark.skipif(which("promtool") is None, reason="no promtool: apt-get install prometheus")
def test_prometheus_finds_nothing_to_dislike() -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=rendered(lambda: [STATUS]),
        text=True,
        capture_output=True,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_it_is_served_on_a_free_port_until_stopped() -> None:
    port, stop = serve_metrics(lambda: [STATUS], "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert b'trimtab_step{run="r"} 7.0' in answer.read()
    stop()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
