"""The main job as a user runs it: real trainings, a real controller, one story everywhere."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from prometheus import scraping
from serving import wait_for

from trimtab.controller.journal import Journal

TIMEOUT_S = 600


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_guarded_runs_end_better_and_every_witness_tells_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "trimtab", "demo", "--hold", "--steps", "270"]
    printed = tmp_path / "printed.txt"
    with printed.open("wb") as output:
        demo = subprocess.Popen(
            [*command, "--out", str(out)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"COLUMNS": "120"},
            start_new_session=True,
        )
    try:
        wait_for(
            f"the demo is done, see {printed} and {out}",
            lambda: "Ctrl-C ends it" in printed.read_text() or demo.poll() is not None,
            TIMEOUT_S,
        )
        assert demo.poll() is None, printed.read_text()
        compare_witnesses(out, printed.read_text(), tmp_path)
    finally:
        demo.send_signal(signal.SIGINT)
        code = demo.wait(60)
    assert code == 0, printed.read_text()

    result = json.loads((out / "result.json").read_text())
    figures = {run["run"]: run for run in result["runs"]}
    for cause in "ED":
        guarded, unguarded = figures[f"{cause}-guarded"], figures[f"{cause}-unguarded"]
        assert guarded["validation_loss"] < unguarded["validation_loss"]
        assert guarded["steps_lost"] < unguarded["steps_lost"]
        assert abs(guarded["validation_loss"] - figures["clean"]["validation_loss"]) < 0.02
    vetoes = [i for i in result["interventions"] if i["run"] == "demo-E-guarded"]
    assert [(i["step"], i["rule"], i["action"]) for i in vetoes] == [
        (250, "bad-batch", "skip_batch")
    ]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


def compare_witnesses(out: Path, printed: str, tmp_path: Path) -> None:
    """The printed table, the journal, /metrics and Prometheus name the same interventions."""
    row = re.compile(r"│ (demo-\S+) +│ (\d+) +│ (\S+) +│ (\S+) +│ (\S+) +│")
    table = [(run, int(step), *rest) for run, step, *rest in row.findall(printed)]
    assert len(table) >= 3

    journal = Journal(f"sqlite:///{out}/journal.db")
    told = [
        (r["run"], r["step"], r["rule"], r["action"], r["outcome"]) for r in journal.interventions()
    ]
    journal.close()
    assert table == told

    counted = Counter((run, rule, action) for run, _, rule, action, _ in told)
    ready = json.loads((out / "ready.json").read_text())
    with urllib.request.urlopen(ready["metrics"], timeout=10) as answer:
        live = answer.read().decode()
    for text in (live, (out / "metrics.prom").read_text()):
        assert metrics_of(text) == counted
    if which("prometheus"):
        with scraping(ready["metrics"], tmp_path) as query:
            assert wait_for("Prometheus scraped", scraped(query), 30) == counted


def metrics_of(text: str) -> Counter[tuple[str, str, str]]:
    """Return the interventions that a scrape counts."""
    line = re.compile(
        r'^trimtab_interventions_total\{action="(.+)",rule="(.+)",run="(.+)"\} ([1-9]\d*)\.0$',
        re.MULTILINE,
    )
    return Counter({(run, rule, action): int(n) for action, rule, run, n in line.findall(text)})


def scraped(query: Callable[[str], list[dict[str, Any]]]) -> Callable[[], Counter[Any]]:
    """Return what asks Prometheus for the interventions."""

    def ask() -> Counter[Any]:
        found = query("trimtab_interventions_total > 0")
        return Counter(
            {
                (e["metric"]["run"], e["metric"]["rule"], e["metric"]["action"]): int(e["value"][1])
                for e in found
            }
        )

    return ask
