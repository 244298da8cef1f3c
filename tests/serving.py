"""Real controllers for tests: `trimtab serve` in a process of its own, on free ports."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 90.0

RAY_FOLDER = re.compile(r"/tmp/trimtab-\w+")
"""Where a controller's own Ray keeps its files, as on its processes' command lines."""


def wait_for(what: str, done: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Return the first true value of `done`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := done():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {timeout_s} s")


class Served:
    """One controller; start() again after a stop() or kill() takes the same port and store."""

    def __init__(self, folder: Path, policy: str, ray_address: str = "local") -> None:
        self.folder = folder
        self.ray_address = ray_address
        self.policy = folder / "policy.yaml"
        self.policy.write_text(policy)
        self.store = folder / "journal.db"
        self.log = folder / "controller.log"
        self.address, self.metrics, self.port = "", "", 0
        self.start()

    def start(self) -> None:
        """Start it and wait until it is up."""
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "trimtab", "serve", "--policy", str(self.policy)]
        command += ["--port", str(self.port), "--metrics-port", "0", "--store", str(self.store)]
        command += ["--ready-file", str(ready), "--ray-address", self.ray_address]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        wait_for(
            f"controller up, see {self.log}",
            lambda: ready.exists() or self.process.poll() is not None,
            START_TIMEOUT_S,
        )
        assert self.process.poll() is None, self.log.read_text()
        addresses = json.loads(ready.read_text())
        self.address, self.metrics = addresses["address"], addresses["metrics"]
        self.port = int(self.address.rsplit(":", 1)[1])

    def stop(self) -> int:
        """Ask it to stop, as a person or a supervisor would; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill(self) -> None:
        """Let it die without a word, and with it what holds its port."""
        family = self.descendants()
        folders = {found for pid in family for found in RAY_FOLDER.findall(title(pid))}
        actors = [pid for pid in family if "ray::Gateway" in title(pid) or "RunActor" in title(pid)]
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        wait_for("the actors end with the controller", lambda: not any(map(alive, actors)))
        for pid in filter(alive, family):  # Ray's own agents outlive a killed raylet for a while
            os.kill(pid, signal.SIGKILL)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def descendants(self) -> list[int]:
        """Return the process ids of everything that it started."""
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(path.parent.name)] = int(fields[1])
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]

    def actor(self, name: str) -> int:
        """Return the process id of a Ray actor, by its class."""
        titled = [pid for pid in self.descendants() if f"ray::{name}" in title(pid)]
        assert len(titled) == 1, [title(pid) for pid in self.descendants()]
        return titled[0]

    def scrape(self) -> str:
        """Return what /metrics says."""
        with urllib.request.urlopen(self.metrics, timeout=10) as answer:
            return str(answer.read().decode())

    def cli(self, *arguments: str) -> Any:
        """Return what a trimtab command answers in JSON."""
        command = [sys.executable, "-m", "trimtab", *arguments, "--address", self.address, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def title(pid: int) -> str:
    """Return a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
