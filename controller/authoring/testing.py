"""Unit tests of policies, written in YAML: series in, the decisions that must follow out.

In the way promtool tests rules.  Called by `trimtab policy test`.
"""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trimtab.controller.document import Document, PolicyError
from trimtab.controller.engine.model import Action, Change, Decision, Intervention, Layout, Mode
from trimtab.controller.engine.policy import Policy
from trimtab.controller.engine.signals import SCALED_BY_LR, SIGNALS
from trimtab.controller.loader import load_policy, read_text
from trimtab.controller.shape import near
from trimtab.controller.simulation import SimulatedJob

MAX_STEPS = 1_000_000
"""Longest test."""

_SEGMENT = re.compile(
    r"(?P<value>_|[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"
    r"(?: (?P<way>to|decay) (?P<end>[-+]?\d+\.?\d*(?:e[-+]?\d+)?))?"
    r"(?: ~(?P<noise>\d+\.?\d*)%)?"
    r"(?: x(?P<steps>\d+))?"
)
NOTATION = (
    "segments, one after the other: `2.5`, `2.5 x300` (constant), `2.5 ~1% x300` (with noise),"
    " `2 to 3 x50` (ramp), `5 decay 2 x30` (a spike that decays), `nan`, `_ x3` (missing)"
)


def series(text: str, noise: random.Random) -> list[float | None]:
    """Return the values that a line of segments stands for; None where one is missing.

    Raises:
        ValueError: If it is none.
    """
    values: list[float | None] = []
    for part in str(text).split(","):
        found = _SEGMENT.fullmatch(" ".join(part.split()))
        if found is None:
            raise ValueError(f"{part.strip()!r} is no segment of a series; {NOTATION}")
        steps = int(found["steps"] or 1)
        if len(values) + steps > MAX_STEPS:
            raise ValueError(f"longer than {MAX_STEPS} steps")
        spread = float(found["noise"] or 0) / 100
        for at in range(steps):
            value = _at(found, at, steps)
            if value is not None and spread:
                value *= 1 + spread * noise.gauss(0, 1)
            values.append(value)
    return values


def _at(found: re.Match[str], at: int, steps: int) -> float | None:
    if found["value"] == "_":
        return None
    start = float(found["value"])
    if found["way"] is None:
        return start
    end = float(found["end"])
    if found["way"] == "to":
        return start + (end - start) * at / max(1, steps - 1)
    return end + (start - end) * math.exp(-5.0 * at / steps)


def _span(value: Any) -> tuple[int, int]:
    """Read `300` or `300-307`, both ends included."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value).strip())
    if found is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is no step, such as 300 or 300-307")
    first = int(found[1])
    last = int(found[2] or first)
    if last < first:
        raise ValueError(f"{value!r} ends before it begins")
    return first, last


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Expected(_Strict):
    """A decision that must be made on each of these steps."""

    step: Annotated[tuple[int, int], BeforeValidator(_span)]
    rule: str
    action: Action
    mode: Mode = Mode.ACT
    rung: int | None = None
    layers: list[str] | None = None
    outcome: str | None = None


class Case(_Strict):
    """One test."""

    name: str
    seed: int = 0
    start: int = 1000
    """Step of the run at which the series begin: past `after`."""
    layer_groups: list[str] = []
    series: dict[str, str | float | int]
    declare: dict[int, list[Change]] = {}
    """Steps to what the job declares before them."""
    expect: list[Expected]


class Suite(_Strict):
    """A file of tests."""

    policy: str
    """The policy's file, from this file's folder."""
    tests: Annotated[list[Case], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a test went."""

    file: str
    name: str
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every decision was expected, and every expected one was made."""
        return not self.failures


def load_suite(path: Path) -> tuple[Suite, Policy]:
    """Return the tests in a file, and the policy that they test.

    Raises:
        PolicyError: With every problem that was found in either.
    """
    document = Document(read_text(path), str(path))
    try:
        suite = Suite.model_validate(document.content)
    except ValidationError as error:
        for entry in error.errors():
            document.at(tuple(entry["loc"]), entry["msg"].removeprefix("Value error, "))
        raise PolicyError(document.name, document.problems) from None
    policy = load_policy(path.parent / suite.policy)
    rules = [rule.name for rule in policy.rules]
    for at, case in enumerate(suite.tests):
        for index, expected in enumerate(case.expect):
            if expected.rule not in [*rules, "reflex"]:
                place = ("tests", at, "expect", index, "rule")
                document.at(place, f"unknown rule {expected.rule!r} ({near(expected.rule, rules)})")
        for name, text in case.series.items():
            try:
                _split(name, case.layer_groups, policy)
                series(str(text), random.Random(0))
            except ValueError as error:
                document.at(("tests", at, "series", name), str(error))
    if document.problems:
        raise PolicyError(document.name, document.problems)
    return suite, policy


def run_suite(path: Path) -> Iterator[Result]:
    """Run the tests in a file.

    Raises:
        PolicyError: If file or policy cannot be used.
    """
    suite, policy = load_suite(path)
    for case in suite.tests:
        yield Result(file=str(path), name=case.name, failures=tuple(_failures(case, policy)))


def _split(name: str, groups: list[str], policy: Policy) -> tuple[str, str]:
    """Return signal and layer group of a series' name; the group is empty for a global one."""
    found = re.fullmatch(r"([a-z_][a-z0-9_]*)(?:\[(.+)\])?", name)
    signal = found[1] if found else ""
    known = [*SIGNALS, *policy.own_signals]
    if found is None or signal not in known:
        raise ValueError(f"unknown signal {name!r} ({near(signal or name, known)})")
    if found[2] is None or signal == "dataset_loss":
        return name, ""
    if not SIGNALS[signal].layered or found[2] not in ("*", *groups):
        raise ValueError(f"{found[2]!r} is none of layer_groups: {', '.join(groups) or 'none'}")
    return signal, found[2]


def _failures(case: Case, policy: Policy) -> Iterator[str]:
    job = _played(case, policy)
    made = [record for record in job.records if isinstance(record, Decision)]
    outcomes = {r.id: r.outcome for r in job.records if isinstance(r, Intervention)}
    open_ends = list(made)
    for expected in case.expect:
        for step in range(expected.step[0], expected.step[1] + 1):
            found = next((d for d in open_ends if _is(d, expected, step)), None)
            if found is None:
                yield f"step {step}: {expected.rule} did not decide {expected.action}"
                continue
            open_ends.remove(found)
            yield from _differences(found, expected, str(outcomes.get(found.id, "none")))
    for decision in open_ends:
        yield (
            f"step {decision.step}: {decision.rule} decided {decision.action} ({decision.mode}),"
            f" which is not expected: {'; '.join(decision.evidence)}"
        )


def _is(decision: Decision, expected: Expected, step: int) -> bool:
    return (decision.step, decision.rule, decision.action) == (step, expected.rule, expected.action)


def _differences(decision: Decision, expected: Expected, outcome: str) -> Iterator[str]:
    got = {
        "mode": (expected.mode.value, decision.mode.value),
        "rung": (expected.rung, decision.rung),
        "layers": (expected.layers, list(decision.layers)),
        "outcome": (expected.outcome, outcome),
    }
    for name, (wanted, found) in got.items():
        if wanted is not None and wanted != found:
            yield f"step {decision.step}: {decision.rule}: {name} is {found}, not {wanted}"


def _played(case: Case, policy: Policy) -> SimulatedJob:
    """Return a job that has gone through the series of a test."""
    globals_: dict[str, list[float | None]] = {}
    layered: dict[str, dict[str, list[float | None]]] = {}
    for name, text in sorted(case.series.items(), key=lambda item: "[*]" not in item[0]):
        signal, group = _split(name, case.layer_groups, policy)
        groups = case.layer_groups if group == "*" else [group]
        for its in groups:
            values = series(str(text), random.Random(f"{case.seed} {signal} {its}"))
            (layered.setdefault(signal, {}) if its else globals_)[its or signal] = values
    layout = Layout(
        signals=tuple(globals_),
        layer_groups=tuple(case.layer_groups),
        layer_signals=tuple(layered),
    )
    job = SimulatedJob(policy, layout)
    job.step_number = case.start
    lengths = [len(v) for v in globals_.values()]
    lengths += [len(v) for found in layered.values() for v in found.values()]
    for at in range(max(lengths, default=0)):
        present = {
            signal: value * (job.lr_factor if signal in SCALED_BY_LR else 1.0)
            for signal, found in globals_.items()
            if at < len(found) and (value := found[at]) is not None
        }
        vectors = {
            signal: tuple(_value(found.get(group, []), at) for group in case.layer_groups)
            for signal, found in layered.items()
        }
        declared = tuple(case.declare.get(case.start + at, ()))
        job.take_step(present, vectors, declared)
    return job


def _value(found: list[float | None], at: int) -> float:
    value = found[at] if at < len(found) else None
    return math.nan if value is None else value
