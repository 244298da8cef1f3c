"""Steps a second of the engine, against a naive numpy evaluation of the same rules.

python -m benchmarks.engine [--json]
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, show
from trimtab.controller.engine import sketch
from trimtab.controller.engine.model import Layout, Observation, Registered, Verdict
from trimtab.controller.engine.signals import DATASET_LOSS, SIGNALS
from trimtab.controller.engine.state import State
from trimtab.controller.engine.step import step
from trimtab.controller.loader import load_policy

POLICY = Path(__file__).parents[1] / "policies" / "default.yaml"
WARM_UP, STEPS = 1200, 2000
DIP_EVERY_STEPS = 10
"""Default cadence of the sketch of m/sqrt(v)."""

SCALARS = [n for n, info in SIGNALS.items() if n != DATASET_LOSS and not n.startswith("ratio_dip")]
LAYERED = [n for n, info in SIGNALS.items() if info.layered and not n.startswith("ratio_dip")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = []
    for groups in (1, 32, 128):
        times = _engine(groups)
        name = f"engine_step_p50_{groups}_groups"
        goal = 200.0 if groups == 32 else None
        figures.append(Figure(figure=name, value=statistics.median(times), unit="us", goal=goal))
        rate = 1e6 / statistics.mean(times)
        figures.append(
            Figure(
                figure=f"engine_steps_{groups}_groups", value=rate, unit="steps/s", better="higher"
            )
        )
    engine, naive = statistics.mean(_engine(32)), statistics.mean(_naive(32))
    figures.append(
        Figure(
            figure="naive_numpy_over_engine_32_groups",
            value=naive / engine,
            unit="ratio",
            better="higher",
        )
    )
    show(figures, as_json=args.json)


def _observations(groups: int) -> Callable[[int], tuple[Observation, np.ndarray | None]]:
    noise, rng = random.Random(0), np.random.default_rng(0)
    counts = np.stack(
        [
            np.histogram(rng.normal(0, 0.23, 4096), sketch.BINS, (sketch.LOW, sketch.HIGH))[0]
            for _ in range(groups)
        ]
    )

    def observe(seq: int) -> tuple[Observation, np.ndarray | None]:
        values = {name: noise.uniform(0.99, 1.01) for name in SCALARS}
        values["nonfinite_count"] = 0.0
        vectors = {
            name: tuple([noise.uniform(0.99, 1.01) for _ in range(groups)]) for name in LAYERED
        }
        observation = Observation(
            seq=seq, step=seq, values=values, vectors=vectors, verdict=Verdict(table_seq=seq - 1)
        )
        return observation, counts if seq % DIP_EVERY_STEPS == 0 else None

    return observe


def _layout(groups: int) -> Layout:
    dips = ("ratio_dip", "ratio_dip_pvalue")
    return Layout(
        signals=(*SCALARS, *dips),
        layer_groups=tuple(f"blocks.{at}" for at in range(groups)),
        layer_signals=(*LAYERED, *dips),
    )


def _engine(groups: int) -> list[float]:
    """Return microseconds of each step, the dip of the sketch included."""
    state = State(load_policy(POLICY))
    step(state, Registered(epoch=0, layout=_layout(groups)))
    observe = _observations(groups)
    times = []
    for seq in range(WARM_UP + STEPS):
        observation, counts = observe(seq)
        start = time.perf_counter()
        if counts is not None:
            values, vectors = sketch.dips(counts)
            observation = Observation(
                seq=seq,
                step=seq,
                values={**observation.values, **values},
                vectors={**observation.vectors, **vectors},
                verdict=observation.verdict,
            )
        step(state, observation)
        times.append((time.perf_counter() - start) * 1e6)
    if state.counts["verdict_mismatch",]:
        raise SystemExit("verdicts differ from the table's: the figures mean nothing")
    return times[WARM_UP:]


def _naive(groups: int) -> list[float]:
    """Return microseconds of each step of numpy statistics over every window of the same rules."""
    program = State(load_policy(POLICY)).program
    observe = _observations(groups)
    past: dict[tuple[str, bool], list[Any]] = {}
    times = []
    for seq in range(WARM_UP + STEPS // 4):
        observation, counts = observe(seq)
        start = time.perf_counter()
        vectors: Mapping[str, Any] = observation.vectors
        if counts is not None:
            vectors = {**vectors, **sketch.dips(counts)[1]}
        for (name, each, _), needs in program.needs.items():
            source = vectors if each else observation.values
            if name in source:
                past.setdefault((name, each), []).append(source[name])
            for kind, size, gap in needs.windows:
                window = np.array(past.get((name, each), [[0.0]])[-size - gap :])
                if kind == "summed":
                    np.std(window, axis=0)
                else:
                    center = np.median(window, axis=0)
                    np.median(np.abs(window - center), axis=0)
        times.append((time.perf_counter() - start) * 1e6)
    return times[WARM_UP:]


if __name__ == "__main__":
    main()
