"""A real Prometheus server, with the configuration that ships, scrapes a real controller."""

import subprocess
from pathlib import Path

from paced import fresh, job_of, train
from prometheus import SHIPPED, needs_prometheus, scraping
from serving import Served, wait_for

pytestmark = needs_prometheus


def test_the_shipped_configuration_is_one() -> None:
    subprocess.run(["promtool", "check", "config", str(SHIPPED)], check=True, capture_output=True)


def test_prometheus_returns_the_intervention(served: Served, tmp_path: Path) -> None:
    for _ in train(job := job_of(served.address, "scraped"), 80):
        wait_for("a fresh table", lambda: fresh(job[2]))
    with scraping(served.metrics, tmp_path) as query:
        found = wait_for(
            f"Prometheus scraped, see {tmp_path}",
            lambda: query('trimtab_interventions_total{run="scraped"} > 0'),
            30,
        )
        labels = {key: found[0]["metric"][key] for key in ("rule", "action", "job")}
        assert labels == {"rule": "bad-batch", "action": "skip_batch", "job": "trimtab"}
        told = served.cli("interventions", "--run", "scraped")
        assert int(found[0]["value"][1]) == len(told) == 1
        [loss] = query('trimtab_loss{run="scraped"}')
        assert float(loss["value"][1]) > 0
        [up] = query("trimtab_up")
        assert up["value"][1] == "1"
