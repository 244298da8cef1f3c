"""What the demo measured, as numbers and as a picture."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from trimtab.demo.workload import CAUSES, FOREIGN_AT, JUMP_AT, foreign_batches

ONSET = {"B": FOREIGN_AT, "D": JUMP_AT, "E": FOREIGN_AT}
"""Step at which a cause begins."""

SMOOTH_STEPS = 9
"""Differences between two runs are averaged, curves drawn as medians, over this many steps."""

LOST_SHARE = 0.02
"""A step is lost when the loss is more than this above the clean run's on the same batch."""

CLEAN = "H"
"""The cause of the run that the others are compared with: nothing."""

LEAD_STEPS = 100
"""Steps before the onset that a picture shows."""

UNGUARDED, GUARDED = "#d55e00", "#0072b2"  # Okabe and Ito: told apart by colour-blind people too


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One recorded run."""

    cause: str
    guarded: bool
    lines: Sequence[dict[str, Any]]
    """step, index, loss, update_norm, vetoed of each optimizer step, in order."""
    validation_loss: float

    @property
    def name(self) -> str:
        """What it is called in tables and metrics."""
        return run_name(self.cause, guarded=self.guarded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run comes to, beside the run that nothing happened to."""

    validation_loss: float
    worst_loss: float
    """Highest loss on the training text from the onset on; foreign batches say nothing of it."""
    steps_lost: int
    """Steps that were vetoed, or above the clean run by more than LOST_SHARE."""
    excess: float
    """Loss above the clean run's, summed over the steps from the onset on, in nat-steps."""


def run_name(cause: str, *, guarded: bool) -> str:
    """Return what a run is called."""
    return "clean" if cause == CLEAN else f"{cause}-{'guarded' if guarded else 'unguarded'}"


def read_run(path: Path, cause: str, *, guarded: bool) -> Run:
    """Return a finished run from its record."""
    *lines, last = (json.loads(line) for line in path.read_text().splitlines())
    return Run(cause=cause, guarded=guarded, lines=lines, validation_loss=last["validation_loss"])


def figures(run: Run, clean: Run) -> Figures:
    """Return what a run comes to; batches are compared with the clean run's by their index."""
    onset = ONSET.get(run.cause, 0)
    level = {line["index"]: line["loss"] for line in clean.lines}
    foreign = foreign_batches(run.cause)
    after = [line for line in run.lines[onset:] if line["index"] not in foreign]
    excess = [line["loss"] - level[line["index"]] for line in after if line["index"] in level]
    above = [
        mean > LOST_SHARE * level[line["index"]]
        for mean, line in zip(_means(excess), after, strict=False)
    ]
    vetoed = sum(line["vetoed"] for line in run.lines)
    return Figures(
        validation_loss=run.validation_loss,
        worst_loss=max(line["loss"] for line in after),
        steps_lost=sum(above) + vetoed,
        excess=math.fsum(excess),
    )


def trailing_medians(values: Sequence[float]) -> list[float]:
    """Return the median of each value and those before it: no curve rises before its cause."""
    ends = range(1, len(values) + 1)
    return [statistics.median(values[max(0, end - SMOOTH_STEPS) : end]) for end in ends]


def _means(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and the SMOOTH_STEPS - 1 after it, as far as there are."""
    return [statistics.fmean(values[at : at + SMOOTH_STEPS]) for at in range(len(values))]


def draw(runs: Sequence[Run], interventions: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw loss and pending update norm of each cause's two runs, interventions marked."""
    causes = [cause for cause in dict.fromkeys(run.cause for run in runs) if cause != CLEAN]
    figure, axes = plt.subplots(
        2, len(causes), figsize=(6.4 * len(causes), 6.4), squeeze=False, sharex="col"
    )
    for column, cause in enumerate(causes):
        top, bottom = axes[0][column], axes[1][column]
        shown = [run for run in runs if run.cause == cause]
        for run in shown:
            _curve(top, run, "loss", smooth=True)
            _curve(bottom, run, "update_norm", smooth=False)
        acted = [i for i in interventions if i["run"].endswith(f"{cause}-guarded")]
        _marks(top, acted)
        top.set_title(f"{cause}: {CAUSES[cause]}")
        top.set_ylabel("loss (nats a byte)")
        top.set_ylim(_range(shown))
        top.legend(loc="upper right", frameon=False)
        bottom.set_ylabel("pending update norm")
        bottom.set_yscale("log")
        bottom.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        bottom.yaxis.set_major_formatter("{x:g}")
        bottom.yaxis.set_minor_locator(NullLocator())
        bottom.set_xlabel("optimizer step")
        bottom.set_xlim(left=ONSET[cause] - LEAD_STEPS)
        for axis in (top, bottom):
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _curve(axis: Axes, run: Run, key: str, *, smooth: bool) -> None:
    """Draw a signal of the steps that were applied, and the vetoed ones as crosses."""
    color = GUARDED if run.guarded else UNGUARDED
    label = "with trimtab" if run.guarded else "without"
    applied = [line for line in run.lines if not line["vetoed"]]
    steps, values = [line["step"] for line in applied], [line[key] for line in applied]
    if smooth:
        axis.plot(steps, values, color=color, linewidth=0.6, alpha=0.4)
        values = trailing_medians(values)
    axis.plot(steps, values, color=color, linewidth=1.8, label=label, zorder=3)
    vetoed = [line for line in run.lines if line["vetoed"]]
    if vetoed and not smooth:
        at, norms = [line["step"] for line in vetoed], [line[key] for line in vetoed]
        axis.scatter(at, norms, color=color, marker="x", s=60, zorder=4, label="vetoed")
        axis.legend(loc="upper right", frameon=False)


def _marks(axis: Axes, interventions: Sequence[dict[str, Any]]) -> None:
    for action, style in (("skip_batch", ":"), ("scale_lr", "--"), ("rollback", "-")):
        steps = sorted({i["step"] for i in interventions if i["action"] == action})
        for at, step in enumerate(steps):
            label = f"{action} at step {', '.join(map(str, steps))}" if at == 0 else None
            axis.axvline(step, color="black", linestyle=style, linewidth=1, label=label, zorder=1)


def _range(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the range of the losses shown, but for the foreign batches' own."""
    shown = [
        line["loss"]
        for run in runs
        for line in run.lines[ONSET[run.cause] - LEAD_STEPS :]
        if line["index"] not in foreign_batches(run.cause) and math.isfinite(line["loss"])
    ]
    room = 0.05 * (max(shown) - min(shown))
    return min(shown) - room, max(shown) + 8 * room  # above: the legend
