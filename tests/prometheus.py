"""A real Prometheus server on a free port, with the configuration that ships."""

import json
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import pytest

SHIPPED = Path(__file__).parents[1] / "deploy/prometheus/prometheus.yml"

needs_prometheus = pytest.mark.skipif(
    which("prometheus") is None, reason="no prometheus server: apt-get install prometheus"
)

Query = Callable[[str], list[dict[str, Any]]]
"""Expression -> result of the query API; empty while the server is not up."""


@contextmanager
def scraping(metrics: str, folder: Path) -> Iterator[Query]:
    """Run a server that scrapes a /metrics URL every second."""
    target = metrics.removeprefix("http://").removesuffix("/metrics")
    text = SHIPPED.read_text().replace("127.0.0.1:9461", target)
    config = folder / "prometheus.yml"
    config.write_text(text.replace("scrape_interval: 15s", "scrape_interval: 1s"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def query(expression: str) -> list[dict[str, Any]]:
        question = urllib.parse.urlencode({"query": expression})
        try:
            url = f"http://127.0.0.1:{port}/api/v1/query?{question}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except OSError:
            return []
        return result

    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (
        (folder / "prometheus.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
    ):
        try:
            yield query
        finally:
            server.terminate()
