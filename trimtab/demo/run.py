"""Runs the demo: a controller, and per cause one training without trimtab and one with it.

Called by `trimtab demo`.  Everything it starts, it stops; everything it writes is in one folder.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trimtab.demo.report import CLEAN, Run, draw, figures, read_run, run_name
from trimtab.demo.workload import CAUSES

RANKS = 2
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 40.0
"""More than the 30 s that torchrun itself gives its ranks before it kills them."""
ANSWER_TIMEOUT_S = 60.0
POLL_S = 0.1


class DemoError(Exception):
    """A part of the demo failed; the message has the last lines of its log."""


def run_demo(
    out: Path, causes: Sequence[str], *, seed: int, steps: int, hold: bool, as_json: bool
) -> int:
    """Run the demo and return the exit code: 0 only if every guarded run ended better.

    Raises:
        DemoError: If a process of it failed.
    """
    console = Console(stderr=as_json)
    out.mkdir(parents=True, exist_ok=True)
    console.print(
        f"Two-rank DDP training on CPU, seed {seed}, {steps} steps a run; files in {out}/"
    )
    with _ending_cleanly(), _controller(out, console) as ready, _progress(console) as progress:
        arms = [
            (CLEAN, False),
            *((cause, guarded) for cause in causes for guarded in (False, True)),
        ]
        runs = [
            _train(
                _Job(cause=cause, guarded=guarded, seed=seed, steps=steps, out=out),
                ready["address"],
                progress,
            )
            for cause, guarded in arms
        ]
        progress.stop()
        interventions = _interventions(ready["address"])
        (out / "metrics.prom").write_bytes(_metrics(ready["metrics"]))
        picture = out / "demo.png"
        draw(runs, interventions, picture)
        result = _result(runs, interventions, picture)
        (out / "result.json").write_text(json.dumps(result, indent=2))
        if as_json:
            print(json.dumps(result, indent=2))  # noqa: T201  what was asked for
        else:
            _print(console, result, out)
        if hold:
            _hold(console, ready)
    return 0 if result["better"] else 1


def _result(
    runs: Sequence[Run], interventions: list[dict[str, Any]], picture: Path
) -> dict[str, Any]:
    clean, *others = runs
    losses = {(run.cause, run.guarded): run.validation_loss for run in others}
    return {
        "runs": [
            {"run": run.name, "cause": CAUSES[run.cause], **asdict(figures(run, clean))}
            for run in runs
        ],
        "interventions": interventions,
        "picture": str(picture),
        # An unguarded run that ended in NaN is worse than any number.
        "better": all(
            math.isfinite(losses[cause, True]) and not losses[cause, False] <= losses[cause, True]
            for cause, guarded in losses
            if guarded
        ),
    }


def _print(console: Console, result: dict[str, Any], out: Path) -> None:
    table = Table(title="How the runs ended")
    for heading in ("run", "cause", "end loss", "worst", "steps lost", "excess"):
        table.add_column(heading, justify="left" if heading in ("run", "cause") else "right")
    for row in result["runs"]:
        table.add_row(
            row["run"],
            row["cause"],
            f"{row['validation_loss']:.4f}",
            f"{row['worst_loss']:.2f}" if row["run"] != "clean" else "",
            str(row["steps_lost"]),
            f"{row['excess']:.2f}",
        )
    console.print(table)
    acted = Table(title="What trimtab did")
    for heading in ("run", "step", "rule", "action", "outcome"):
        acted.add_column(heading)
    for entry in result["interventions"]:
        keys = ("run", "step", "rule", "action", "outcome")
        acted.add_row(*(str(entry[key]) for key in keys))
    console.print(acted)
    console.print(
        "end loss: after the last step, on fixed batches of the text; worst: highest on training"
        " text from the cause on; steps lost: vetoed, or over 2 % above the clean run on the same"
        " batches; excess: loss above the clean run's, summed over the steps.",
        style="dim",
    )
    verdict = "ended better" if result["better"] else "did NOT all end better"
    console.print(f"The guarded runs {verdict} than the unguarded ones.")
    console.print(f"Picture: {result['picture']}", soft_wrap=True)
    console.print(f"Metrics as Prometheus would read them: {out}/metrics.prom", soft_wrap=True)
    console.print("To look at /metrics live: make demo ARGS=--hold")


def _hold(console: Console, ready: dict[str, str]) -> None:
    console.print(f"The controller stays up: {ready['metrics']}", soft_wrap=True)
    console.print(f"  trimtab interventions --address {ready['address']}", soft_wrap=True)
    console.print("Ctrl-C ends it.")
    try:
        signal.pause()
    except KeyboardInterrupt:
        console.print("stopping")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP unwind like Ctrl-C, so that whatever was started ends too."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _controller(out: Path, console: Console) -> Iterator[dict[str, str]]:
    """Yield the addresses of a controller that is up."""
    ready, journal = out / "ready.json", out / "journal.db"
    for stale in out.glob("journal.db*"):
        stale.unlink()
    ready.unlink(missing_ok=True)
    options = {
        "--policy": files("trimtab.policies") / "default.yaml",
        "--port": 0,
        "--metrics-port": 0,
        "--store": journal,
        "--ready-file": ready,
    }
    arguments = [str(part) for option in options.items() for part in option]
    with _process(out / "controller.log", ["-m", "trimtab", "serve", *arguments]) as process:
        with console.status("starting the controller on Ray"):
            _wait(process, ready.exists, out / "controller.log", START_TIMEOUT_S)
        yield json.loads(ready.read_text())


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One training of the demo."""

    cause: str
    guarded: bool
    seed: int
    steps: int
    out: Path


def _train(job: _Job, address: str, progress: Progress) -> Run:
    """Run one training to its end and return what it recorded."""
    name = run_name(job.cause, guarded=job.guarded)
    record, log = job.out / f"{name}.jsonl", job.out / f"{name}.log"
    record.unlink(missing_ok=True)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "trimtab.demo.train", "--cause", job.cause, "--record", str(record)]
    command += ["--seed", str(job.seed), "--steps", str(job.steps)]
    command += ["--guarded"] if job.guarded else []
    task = progress.add_task(f"{name:<12}", total=job.steps, loss="-")

    def finished() -> bool:
        lines = record.read_text().splitlines() if record.exists() else []
        if len(lines) > 1:
            last = json.loads(lines[-2])  # the newest may be half written
            progress.update(task, completed=len(lines) - 1, loss=f"{last['loss']:.3f}")
        return process.poll() == 0

    environment = {"TRIMTAB_RUN": f"demo-{name}", "TRIMTAB_ADDRESS": address}
    with tempfile.TemporaryDirectory(prefix="trimtab-demo-") as folder:
        environment["TMPDIR"] = folder  # torchrun leaves its logs there
        with _process(log, command, environment) as process:
            _wait(process, finished, log, None)
    finished()
    progress.update(task, completed=job.steps)
    return read_run(record, job.cause, guarded=job.guarded)


@contextmanager
def _process(
    log: Path, arguments: Sequence[str], environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python with these arguments; whatever happens, it and what it started end with us."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  our own modules
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,  # Ctrl-C reaches us alone; we stop them in order
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(
    process: subprocess.Popen[bytes], done: Callable[[], bool], log: Path, timeout_s: float | None
) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not done():
        code = process.poll()
        late = deadline is not None and time.monotonic() > deadline
        if late or code not in (None, 0):
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            what = f"did not come up in {timeout_s:.0f} s" if late else f"ended with code {code}"
            raise DemoError(f"{log.stem} {what}; the end of {log}:\n{tail}")
        time.sleep(POLL_S)


def _interventions(address: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "trimtab", "interventions", "--address", address, "--json"]
    try:
        answer = subprocess.run(  # noqa: S603  ours
            command, capture_output=True, text=True, check=False, timeout=ANSWER_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise DemoError(str(error)) from error
    if answer.returncode != 0:
        raise DemoError(f"the controller did not list its interventions: {answer.stderr.strip()}")
    found: list[dict[str, Any]] = json.loads(answer.stdout)
    return found


def _metrics(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S) as answer:  # noqa: S310  ours
            return bytes(answer.read())
    except OSError as error:
        raise DemoError(f"{url}: {error}") from error
