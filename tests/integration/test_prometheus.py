"""A real Prometheus server, with the configuration that ships, scrapes a real controller."""

import json
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from paced import fresh, job_of, train
from serving import Served, wait_for

pytestmark = pytest.mark.skipif(
    which("prometheus") is None, reason="no prometheus server: apt-get install prometheus"
)

SHIPPED = Path(__file__).parents[2] / "deploy/prometheus/prometheus.yml"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def query(port: int, expression: str) -> list[dict[str, Any]]:
    """Return what Prometheus's query API answers."""
    question = urllib.parse.urlencode({"query": expression})
    url = f"http://127.0.0.1:{port}/api/v1/query?{question}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return result


def test_the_shipped_configuration_is_one() -> None:
    subprocess.run(["promtool", "check", "config", str(SHIPPED)], check=True, capture_output=True)


def test_prometheus_returns_the_intervention(served: Served, tmp_path: Path) -> None:
    for _ in train(job := job_of(served.address, "scraped"), 80):
        wait_for("a fresh table", lambda: fresh(job[2]))
    target = served.metrics.removeprefix("http://").removesuffix("/metrics")
    config = tmp_path / "prometheus.yml"
    text = SHIPPED.read_text().replace("127.0.0.1:9461", target)
    config.write_text(text.replace("scrape_interval: 15s", "scrape_interval: 1s"))
    assert target in config.read_text()
    port = free_port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    log = tmp_path / "prometheus.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as server,
    ):
        try:

            def answered() -> list[dict[str, Any]]:
                try:
                    return query(port, 'trimtab_interventions_total{run="scraped"} > 0')
                except OSError:
                    return []

            found = wait_for(f"Prometheus scraped, see {log}", answered, 30)
            labels = {key: found[0]["metric"][key] for key in ("rule", "action", "job")}
            assert labels == {"rule": "bad-batch", "action": "skip_batch", "job": "trimtab"}
            told = served.cli("interventions", "--run", "scraped")
            assert int(found[0]["value"][1]) == len(told) == 1
            [loss] = query(port, 'trimtab_loss{run="scraped"}')
            assert float(loss["value"][1]) > 0
            [up] = query(port, "trimtab_up")
            assert up["value"][1] == "1"
        finally:
            server.terminate()
