"""Run states as Prometheus metrics, rendered at scrape time.  Served by the daemon."""

from collections.abc import Callable, Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab.controller.engine.episode import EpisodeKind
from trimtab.controller.engine.model import REFLEX, Action, Mode, Outcome
from trimtab.controller.engine.rule import Phase
from trimtab.controller.engine.signals import SIGNALS

Statuses = Callable[[], list[dict[str, Any]]]
"""Returns every run's status; raises when the controller does not answer."""


class RunCollector(Collector):
    """Asks for the runs' states on every scrape; a run that is gone vanishes."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; only `trimtab_up` 0 when the controller does not answer."""
        up = GaugeMetricFamily("trimtab_up", "Whether the controller answered this scrape.")
        try:
            statuses = self._statuses()
        except Exception:  # noqa: BLE001  a blind watcher must not look healthy, nor break
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        runs = GaugeMetricFamily(
            "trimtab_runs", "Runs that registered since the controller started."
        )
        runs.add_metric([], len(statuses))
        yield runs
        yield from _signals(statuses)
        yield from _gauges(statuses)
        yield from _counters(statuses)
        yield _phases(statuses)


# Prometheus keeps the ending _count for histograms and summaries.
_METRIC_OF = {"nonfinite_count": "trimtab_nonfinite_gradient_elements"}


def _signals(statuses: list[dict[str, Any]]) -> Iterator[Metric]:
    for signal, info in SIGNALS.items():
        family = GaugeMetricFamily(
            _METRIC_OF.get(signal, f"trimtab_{signal}"),
            info.meaning[0].upper() + info.meaning[1:] + ".",
            labels=["run"],
        )
        for status in statuses:
            if signal in status["values"]:
                family.add_metric([status["run"]], status["values"][signal])
        yield family


_GAUGES = {
    "step": "Optimizer step of the last observation; goes back on a rollback.",
    "epoch": "Restarts of the job, counted from 0.",
    "lr_factor": "Product of trimtab's own LR factors in force.",
    "connected": "Whether the job's leader has a stream open.",
    "last_observation_timestamp_seconds": "Unix time of the last observation.",
    "journal_lag_steps": "Observed steps that are not in the journal yet.",
}
_COUNTERS = {
    "journal_errors": "Failed writes of the journal.",
    "late_steps": "Steps judged by a table older than the step before.",
    "unarmed_steps": "Steps judged without a table, by the reflex alone.",
    "verdict_mismatches": "Verdicts that the job's table does not give; 0 unless there is a bug.",
    "rebaselines": "New levels accepted after a long run of flagged values.",
}


def _gauges(statuses: list[dict[str, Any]]) -> Iterator[Metric]:
    for name, meaning in _GAUGES.items():
        family = GaugeMetricFamily(f"trimtab_{name}", meaning, labels=["run"])
        for status in statuses:
            family.add_metric([status["run"]], float(status[name.replace("_seconds", "_s")]))
        yield family
    family = GaugeMetricFamily(
        "trimtab_run_info", "Policy of a run.", labels=["run", "policy_version"]
    )
    for status in statuses:
        family.add_metric([status["run"], status["policy_version"]], 1)
    yield family


def _counters(statuses: list[dict[str, Any]]) -> Iterator[Metric]:
    for name, meaning in _COUNTERS.items():
        family = CounterMetricFamily(f"trimtab_{name}", meaning, labels=["run"])
        for status in statuses:
            counted = {
                "verdict_mismatches": status["counts"].get(("verdict_mismatch",), 0),
                "rebaselines": status["counts"].get(("rebaseline",), 0),
            }
            family.add_metric([status["run"]], counted.get(name) or status.get(name, 0))
        yield family

    # Every label set is there from the start at 0, or increase() would miss the first event.
    labels = ["run", "rule", "action"]
    decided = CounterMetricFamily(
        "trimtab_decisions", "Decisions of a rule, observed ones too.", labels=[*labels, "mode"]
    )
    intervened = CounterMetricFamily(
        "trimtab_interventions", "Interventions carried out.", labels=labels
    )
    ended = CounterMetricFamily(
        "trimtab_intervention_outcomes", "How interventions ended.", labels=[*labels, "outcome"]
    )
    for status in statuses:
        run, counts = status["run"], status["counts"]
        modes = status["modes"] | {REFLEX: Mode.ACT.value}
        for rule, action in [*status["actions"], (REFLEX, Action.SKIP_BATCH.value)]:
            mode = modes[rule]
            decided.add_metric(
                [run, rule, action, mode], counts.get(("decision", rule, action, mode), 0)
            )
            if action == Action.ALERT:
                continue
            intervened.add_metric(
                [run, rule, action], counts.get(("intervention", rule, action), 0)
            )
            for outcome in Outcome:
                if outcome is not Outcome.PENDING:
                    count = counts.get(("outcome", rule, action, outcome.value), 0)
                    ended.add_metric([run, rule, action, outcome.value], count)
    yield from (decided, intervened, ended)
    yield from _rule_counters(statuses)


def _rule_counters(statuses: list[dict[str, Any]]) -> Iterator[Metric]:
    climbs = CounterMetricFamily(
        "trimtab_ladder_climbs", "Times a rule's ladder went up a rung.", labels=["run", "rule"]
    )
    over_budget = CounterMetricFamily(
        "trimtab_over_budget",
        "Matches that were not acted on: the run's budget or the cause's was spent.",
        labels=["run", "rule"],
    )
    inactive = GaugeMetricFamily(
        "trimtab_rule_inactive",
        "1 for a rule that needs a signal which the job does not measure.",
        labels=["run", "rule"],
    )
    episodes = CounterMetricFamily(
        "trimtab_episodes", "Instabilities that ended, by kind.", labels=["run", "kind"]
    )
    for status in statuses:
        run, counts = status["run"], status["counts"]
        for rule in status["phases"]:
            climbs.add_metric([run, rule], counts.get(("climb", rule), 0))
            over_budget.add_metric([run, rule], counts.get(("over_budget", rule), 0))
            inactive.add_metric([run, rule], float(rule in status["inactive"]))
        for kind in EpisodeKind:
            episodes.add_metric([run, kind.value], counts.get(("episode", kind.value), 0))
    yield from (climbs, over_budget, inactive, episodes)


def _phases(statuses: list[dict[str, Any]]) -> Metric:
    family = GaugeMetricFamily(
        "trimtab_rule_phase", "1 for the phase a rule is in.", labels=["run", "rule", "phase"]
    )
    for status in statuses:
        for rule, current in status["phases"].items():
            for phase in Phase:
                family.add_metric([status["run"], rule, phase.value], float(phase == current))
    return family


def serve_metrics(statuses: Statuses, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Serve /metrics on its own threads; return the port and what stops it.

    Raises:
        OSError: If the port is taken.
    """
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = prometheus_client.CollectorRegistry()
    registry.register(RunCollector(statuses))
    server, thread = prometheus_client.start_http_server(port, host, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
