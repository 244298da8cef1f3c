"""Controllers on a Ray cluster that is not their own."""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import POLICY
from paced import fresh, job_of, train
from serving import Served, wait_for

HEAD = """
import ray, sys
head = ray.init(address="local", include_dashboard=False, object_store_memory=80_000_000)
print("address", head.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of somebody's cluster, which must outlive our controllers."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # who joins must know the token
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with (
        (tmp_path / "head.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", HEAD], stdin=-1, stdout=-1, stderr=log, text=True
        ) as head,
    ):
        assert head.stdout is not None
        line = next(line for line in head.stdout if line.startswith("address"))
        yield line.split()[1]
        assert head.poll() is None
        head.communicate()


def test_a_controller_ends_its_own_actors_and_no_others(cluster: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = (Served(tmp_path / name, POLICY, cluster) for name in "ab")
    try:
        for _ in train(job := job_of(first.address, "shared"), 20):
            wait_for("a fresh table", lambda: fresh(job[2]))
        first.kill()  # its detached actors live on, and hold its port
        first.start()
        assert [run["run"] for run in first.cli("runs")] == []  # none since it started
        for _ in train(job := job_of(first.address, "shared"), 20):
            wait_for("a fresh table", lambda: fresh(job[2]))
        [run] = first.cli("runs")
        assert (run["run"], run["epoch"]) == ("shared", 1)
        assert first.stop() == 0
        assert second.cli("runs") == []  # still there
    finally:
        assert second.stop() == 0
