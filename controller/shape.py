"""The shape of a policy file: which keys there are, and how counts and limits are spelled.

Used by the loader, and by `schema` to tell editors.
"""

import difflib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from trimtab.controller.engine.model import DECLARED, Change, Mode
from trimtab.controller.engine.policy import Limit

NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"
"""Names of rules are kebab-case."""


def near(word: str, words: list[str]) -> str:
    """Return a hint at the right word: the nearest, or all there are."""
    found = difflib.get_close_matches(word, words, 1)
    return f"did you mean {found[0]}?" if found else f"there are: {', '.join(words)}"


def count(unit: str, least: int) -> Callable[[Any], int]:
    """Return a reader of `20 steps`, `20` or `"20"`."""
    plural = unit + ("es" if unit.endswith("ch") else "s")

    def read(value: Any) -> int:
        found = re.fullmatch(rf"(\d{{1,12}})(?: (?:{unit}|{plural}))?", str(value).strip())
        if isinstance(value, bool) or found is None or int(found[1]) < least:
            raise ValueError(
                f"{value!r} is no number of {plural}, such as `20 {plural}`, from {least} up"
            )
        return int(found[1])

    return read


def limit(value: Any) -> Limit:
    """Read `8 per 1000 steps`.

    Raises:
        ValueError: If it is none.
    """
    found = re.fullmatch(r"(\d{1,9}) per (\d{1,9})(?: steps?)?", str(value).strip())
    if found is None or int(found[1]) < 1 or int(found[2]) < 1:
        raise ValueError(f"{value!r} is no limit, such as `8 per 1000 steps`")
    return Limit(count=int(found[1]), window_steps=int(found[2]))


def _mode(value: Any) -> Mode:
    if value == "approve":
        raise ValueError("mode 'approve' is not in this version of trimtab yet; use observe or act")
    if value not in list(Mode):
        raise ValueError(f"mode must be observe or act, not {value!r}")
    return Mode(value)


def _hold_off(value: Any) -> dict[Change, int]:
    """Read `20 steps`, for every change, or a mapping of changes to steps."""
    read = count("step", 0)
    if not isinstance(value, dict):
        return dict.fromkeys(Change, read(value))
    for name in value:
        if name not in list(Change):
            raise ValueError(f"unknown change {name!r} ({near(str(name), list(Change))})")
    return {Change(name): read(steps) for name, steps in value.items()}


def _changes(value: Any) -> frozenset[Change]:
    allowed = [*DECLARED, Change.RESUME]
    if not isinstance(value, list):
        raise ValueError(f"needs a list of changes; there are: {', '.join(allowed)}")  # noqa: TRY004
    for name in value:
        if name not in allowed:
            raise ValueError(f"unknown change {name!r} ({near(str(name), list(allowed))})")
    return frozenset(Change(name) for name in value)


def _words(value: Any) -> dict[str, str]:
    """Read a mapping of words to words; numbers are taken as they are spelled."""
    if not isinstance(value, dict):
        raise ValueError("needs a mapping of words to words")  # noqa: TRY004
    for key, word in value.items():
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", key):
            raise ValueError(f"{key!r} is no snake_case word")
        if not isinstance(word, str | int | float):
            raise ValueError(f"{key}: needs a word")  # noqa: TRY004
    return {key: str(word) for key, word in value.items()}


def _patterns(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(p, str) for p in found):
        raise ValueError("needs patterns of layer groups, such as [blocks.0, blocks.1*]")
    return tuple(found)


def _text(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": ["string", "integer"], "pattern": pattern})


_STEPS_TEXT = r"^\d+( steps?)?$"
_HOLD_OFF = {"type": ["string", "integer"], "pattern": _STEPS_TEXT}

Steps = Annotated[int, BeforeValidator(count("step", 0)), _text(_STEPS_TEXT)]
SomeSteps = Annotated[int, BeforeValidator(count("step", 1)), _text(_STEPS_TEXT)]
TwoSteps = Annotated[int, BeforeValidator(count("step", 2)), _text(_STEPS_TEXT)]
RuleLimit = Annotated[
    Limit,
    BeforeValidator(limit),
    WithJsonSchema({"type": "string", "pattern": r"^\d+ per \d+( steps?)?$"}),
]
RuleMode = Annotated[
    Mode, BeforeValidator(_mode), WithJsonSchema({"enum": [mode.value for mode in Mode]})
]
HoldOff = Annotated[
    dict[Change, int],
    BeforeValidator(_hold_off),
    WithJsonSchema(
        {
            "anyOf": [
                _HOLD_OFF,
                {
                    "type": "object",
                    "properties": {change.value: _HOLD_OFF for change in Change},
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
Changes = Annotated[
    frozenset[Change],
    BeforeValidator(_changes),
    WithJsonSchema(
        {"type": "array", "items": {"enum": [c.value for c in (*DECLARED, Change.RESUME)]}}
    ),
]
Words = Annotated[
    dict[str, str],
    BeforeValidator(_words),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number"]}}),
]
Patterns = Annotated[
    tuple[str, ...],
    BeforeValidator(_patterns),
    WithJsonSchema({"type": ["array", "string"], "items": {"type": "string"}}),
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class DefaultsShape(_Strict):
    """`defaults:`, for every rule that does not say otherwise."""

    after: Annotated[Steps, Field(description="First step at which rules are active.")] = 100
    cooldown: Annotated[Steps, Field(description="Steps without another decision.")] = 0
    limit: Annotated[RuleLimit, Field(description="Decisions in a window of steps.")] = Limit(
        count=16, window_steps=1000
    )
    recover_within: Annotated[SomeSteps, Field(description="Deadline of the outcome.")] = 50
    hold_off: Annotated[HoldOff, Field(description="Steps without a match after a change.")] = {}


class RuleShape(_Strict):
    """One entry of `rules:`."""

    name: Annotated[str, Field(pattern=f"^{NAME}$", max_length=64, description="kebab-case")]
    when: Annotated[Any, Field(description="The condition, one expression.")]
    do: Annotated[Any, Field(description="What it does: actions and their arguments.")]
    for_: Annotated[SomeSteps, Field(alias="for", description="Matches in a row.")] = 1
    after: Annotated[Steps | None, Field(description="First step of the run.")] = None
    cooldown: Annotated[Steps | None, Field(description="Steps without another.")] = None
    limit: Annotated[RuleLimit | None, Field(description="Decisions in a window of steps.")] = None
    ladder: Annotated[Any, Field(description="What it does when `do` does not help.")] = None
    recover_within: Annotated[SomeSteps | None, Field(description="Deadline.")] = None
    hold_off: Annotated[HoldOff | None, Field(description="Steps without a match.")] = None
    layers: Annotated[Patterns, Field(description="Layer groups that it looks at.")] = ()
    labels: Annotated[Words, Field(description="Words for alerts; `cause` shares a budget.")] = {}
    mode: Annotated[RuleMode, Field(description="observe or act")] = Mode.ACT
    summary: Annotated[str, Field(description="One sentence for who reads a decision.")] = ""


class LimitsShape(_Strict):
    """`limits:`, of the acting decisions of several rules together."""

    run: Annotated[RuleLimit, Field(description="Of all rules.")] = Limit(
        count=64, window_steps=1000
    )
    causes: Annotated[dict[str, RuleLimit], Field(description="Of a label `cause`.")] = {}


class PolicyShape(_Strict):
    """A policy file."""

    version: Annotated[Literal[1], Field(description="Of this format.")]
    summary: Annotated[str, Field(description="What the policy is for.")] = ""
    sources: Annotated[list[str], Field(description="Where its numbers come from.")] = []
    defaults: DefaultsShape = DefaultsShape()
    limits: LimitsShape = LimitsShape()
    expires: Annotated[SomeSteps, Field(description="How long an old table may judge.")] = 50
    rebaseline: Annotated[TwoSteps, Field(description="Flagged values that are a new level.")] = 16
    rearm_on: Annotated[Changes, Field(description="Changes after which the past starts anew.")] = (
        frozenset(DECLARED)
    )
    signals: Annotated[Words, Field(description="User-defined signals and their meaning.")] = {}
    rules: list[RuleShape]
