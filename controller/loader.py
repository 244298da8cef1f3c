"""Policy files: YAML text to an engine policy, or a list of errors with file, line and column.

Called by the CLI and the gateway.  PyYAML gives the places, pydantic checks the shape, the engine
parses the expressions; this module turns what any of them dislikes into one kind of message.
"""

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trimtab.controller.document import Document, Place, PolicyError, Problem
from trimtab.controller.engine.expression import Constant, ExpressionError, Node, parse
from trimtab.controller.engine.model import REFLEX, Action, Mode
from trimtab.controller.engine.policy import ActionCall, Limit, Policy, Rule

MAX_POLICY_BYTES = 1_000_000
"""Largest policy file that is read."""

LATER_ACTIONS = frozenset(
    {
        "clip_update", "undo_lr_jump", "set_betas", "set_eps", "add_gradient_noise",
        "reset_moments", "checkpoint", "pause", "halt",
    }
)  # fmt: skip
"""Actions that the design names and this version does not have."""

LATER_KEYS = frozenset({"ladder", "hold_off", "labels", "layers"})
"""Keys of a rule that the design names and this version does not have."""


def load_policy(path: Path) -> Policy:
    """Return the policy in a file.

    Raises:
        PolicyError: With every problem that was found.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise PolicyError(str(path), [Problem(0, 0, f"{error.strerror}")]) from None
    if len(raw) > MAX_POLICY_BYTES:
        raise PolicyError(str(path), [Problem(0, 0, f"larger than {MAX_POLICY_BYTES} bytes")])
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise PolicyError(str(path), [Problem(0, 0, f"not UTF-8: {error.reason}")]) from None
    return parse_policy(text, str(path))


def parse_policy(text: str, name: str) -> Policy:
    """Return the policy in a text; `name` is what messages call it.

    Raises:
        PolicyError: With every problem that was found.
    """
    document = Document(text, name)
    content = document.content
    if not isinstance(content, dict):
        what = "empty" if content is None else f"a {type(content).__name__}, not a mapping"
        raise PolicyError(
            name, [Problem(1, 1, f"the policy is {what}; it starts with `version: 1`")]
        )
    parsed = _parsed(document, content)
    try:
        model = _Policy.model_validate(content)
    except ValidationError as error:
        document.problems += [_problem(document, e) for e in error.errors()]
        raise PolicyError(name, document.problems) from None
    rules = tuple(_rules(document, model, parsed))
    if document.problems:
        raise PolicyError(name, document.problems)
    return Policy(
        version=hashlib.sha256(text.encode()).hexdigest()[:12],
        text=text,
        name=name,
        rules=rules,
        expires_steps=model.expires,
        rebaseline_steps=model.rebaseline,
    )


def _problem(document: Document, error: Any) -> Problem:
    """Return pydantic's complaint in our words, at its place."""
    path: Place = tuple(error["loc"])
    kind, message = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        key = str(path[-1])
        model = _MODEL_OF.get(next((p for p in path[:-1] if isinstance(p, str)), ""), _Policy)
        message = f"unknown key {key!r} ({_near(key, list(model.model_fields))})"
        if model is _Rule and key in LATER_KEYS:
            message = f"key {key!r} is not in this version of trimtab yet"
        document.report(document.keys[path], message)
    elif kind == "missing":
        document.at(path[:-1], f"key {path[-1]!r} is missing")
    else:
        document.at(path, message[0].lower() + message[1:])
    return document.problems.pop()


def _near(word: str, words: list[str]) -> str:
    found = difflib.get_close_matches(word, words, 1)
    return f"did you mean {found[0]}?" if found else f"there are: {', '.join(words)}"


def _count(unit: str, least: int) -> Callable[[Any], int]:
    """Return a reader of `20 steps`, `20` or `"20"`."""
    plural = unit + ("es" if unit.endswith("ch") else "s")

    def read(value: Any) -> int:
        found = re.fullmatch(rf"(\d+)(?: (?:{unit}|{plural}))?", str(value).strip())
        if isinstance(value, bool) or found is None or int(found[1]) < least:
            raise ValueError(
                f"{value!r} is no number of {plural}, such as `20 {plural}`, from {least} up"
            )
        return int(found[1])

    return read


def _limit(value: Any) -> Limit:
    found = re.fullmatch(r"(\d+) per (\d+)(?: steps?)?", str(value).strip())
    if found is None or int(found[1]) < 1 or int(found[2]) < 1:
        raise ValueError(f"{value!r} is no limit, such as `8 per 1000 steps`")
    return Limit(count=int(found[1]), window_steps=int(found[2]))


def _mode(value: Any) -> Mode:
    if value == "approve":
        raise ValueError("mode 'approve' is not in this version of trimtab yet; use observe or act")
    if value not in list(Mode):
        raise ValueError(f"mode must be observe or act, not {value!r}")
    return Mode(value)


Steps = Annotated[int, BeforeValidator(_count("step", 0))]
SomeSteps = Annotated[int, BeforeValidator(_count("step", 1))]
RuleLimit = Annotated[Limit, BeforeValidator(_limit)]
RuleMode = Annotated[Mode, BeforeValidator(_mode)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class _Defaults(_Strict):
    after: Steps = 100
    cooldown: Steps = 0
    limit: RuleLimit = Limit(count=16, window_steps=1000)
    recover_within: SomeSteps = 50


class _Rule(_Strict):
    name: str
    when: Any
    do: Any
    for_: Annotated[SomeSteps, Field(alias="for")] = 1
    after: Steps | None = None
    cooldown: Steps | None = None
    limit: RuleLimit | None = None
    recover_within: SomeSteps | None = None
    mode: RuleMode = Mode.ACT
    summary: str = ""


class _Policy(_Strict):
    version: Literal[1]
    defaults: _Defaults = _Defaults()
    expires: SomeSteps = 50
    rebaseline: Annotated[int, BeforeValidator(_count("step", 2))] = 16
    rules: list[_Rule]


_MODEL_OF: dict[str, type[BaseModel]] = {"defaults": _Defaults, "rules": _Rule}


_Parsed = tuple[Node, tuple[ActionCall, ...]]


def _parsed(document: Document, content: dict[str, Any]) -> dict[int, _Parsed]:
    """Read `when` and `do` of every rule, so that one look at a policy tells all its problems."""
    rules = content.get("rules")
    return {
        index: (
            _expression(document, entry["when"], ("rules", index, "when"), condition=True),
            tuple(_actions(document, entry["do"], ("rules", index, "do"))),
        )
        for index, entry in enumerate(rules if isinstance(rules, list) else [])
        if isinstance(entry, dict) and "when" in entry and "do" in entry
    }


def _rules(document: Document, model: _Policy, parsed: dict[int, _Parsed]) -> Iterator[Rule]:
    names: set[str] = set()
    if not model.rules:
        document.at(("rules",), "a policy needs at least one rule")
    for index, entry in enumerate(model.rules):
        at: Place = ("rules", index)
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", entry.name) or len(entry.name) > 64:
            document.at(
                (*at, "name"),
                f"a name is kebab-case, such as loss-spike: {entry.name!r}",
            )
        if entry.name in names or entry.name == REFLEX:
            taken = "is built in" if entry.name == REFLEX else "stands twice"
            document.at((*at, "name"), f"name {entry.name!r} {taken}")
        names.add(entry.name)
        when, do = parsed[index]
        defaults = model.defaults
        yield Rule(
            name=entry.name,
            when=when,
            do=do,
            for_steps=entry.for_,
            after_steps=_either(entry.after, defaults.after),
            cooldown_steps=_either(entry.cooldown, defaults.cooldown),
            limit=entry.limit or defaults.limit,
            recover_within_steps=entry.recover_within or defaults.recover_within,
            mode=entry.mode,
            summary=entry.summary,
        )


def _either(value: int | None, default: int) -> int:
    return default if value is None else value


def _expression(document: Document, value: Any, at: Place, *, condition: bool) -> Node:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        wanted = "a condition, such as loss > 3" if condition else "a number or an expression"
        document.at(at, f"needs {wanted}")
        return Constant(0.0)
    try:
        return parse(str(value), condition=condition)
    except ExpressionError as error:
        document.at(at, error.message, error.offset)
        return Constant(0.0)


def _actions(document: Document, do: Any, at: Place) -> Iterator[ActionCall]:
    """Read `do`: a name, a mapping of names to arguments, or a list of these."""
    seen: set[str] = set()
    for name, arguments, place in _named(document, do, at):
        if name in LATER_ACTIONS:
            document.at(place, f"action {name!r} is not in this version of trimtab yet")
        elif name not in list(Action):
            document.at(
                place,
                f"unknown action {name!r} ({_near(name, [a.value for a in Action])})",
            )
        elif name in seen:
            document.at(place, f"action {name!r} stands twice")
        else:
            seen.add(name)
            read = _arguments(document, Action(name), arguments, place)
            yield ActionCall(action=Action(name), arguments=read)


def _named(document: Document, do: Any, at: Place) -> Iterator[tuple[str, Any, Place]]:
    if isinstance(do, str):
        yield do, None, at
    elif isinstance(do, dict) and do:
        for name, arguments in do.items():
            yield name, arguments, (*at, name)
    elif isinstance(do, list) and do:
        for index, entry in enumerate(do):
            if isinstance(entry, str | dict):
                yield from _named(document, entry, (*at, index))
            else:
                document.at((*at, index), "needs the name of an action")
    else:
        document.at(at, f"needs actions; there are: {', '.join(Action)}")


_ARGUMENTS: dict[Action, dict[str, Callable[[Any], int] | None]] = {
    Action.SKIP_BATCH: {},
    Action.ALERT: {},
    Action.SCALE_LR: {"by": None, "over": _count("step", 1)},
    Action.ROLLBACK: {"skip": _count("batch", 0), "soak": _count("step", 1)},
}
"""Arguments of each action: what reads a count, or None for an expression."""

_NO_END, _SKIP_BATCHES, _SOAK_STEPS = 0.0, 100.0, 20.0


def _arguments(document: Document, action: Action, given: Any, at: Place) -> dict[str, Node]:
    known = _ARGUMENTS[action]
    if given is not None and not isinstance(given, dict):
        document.at(at, f"{action} takes a mapping of: {', '.join(known) or 'nothing'}")
        return {}
    result: dict[str, Node] = {}
    for key, value in (given or {}).items():
        if key not in known:
            hint = _near(key, list(known)) if known else f"{action} takes none"
            document.report(document.keys[(*at, key)], f"unknown argument {key!r} ({hint})")
        elif (read := known[key]) is None:
            result[key] = _expression(document, value, (*at, key), condition=False)
        else:
            try:
                result[key] = Constant(float(read(value)))
            except ValueError as error:
                document.at((*at, key), str(error))
    return _completed(document, action, result, at)


def _completed(
    document: Document, action: Action, result: dict[str, Node], at: Place
) -> dict[str, Node]:
    """Add the defaults of an action's arguments and check their range where it is known now."""
    if action is Action.SCALE_LR:
        by = result.get("by")
        if by is None:
            document.at(at, "scale_lr needs `by`, a factor in (0, 1]")
        elif isinstance(by, Constant) and not 0 < by.value <= 1:
            document.at((*at, "by"), f"the factor must be in (0, 1], not {by.value:g}")
        result.setdefault("over", Constant(_NO_END))
    if action is Action.ROLLBACK:
        result.setdefault("skip", Constant(_SKIP_BATCHES))
        result.setdefault("soak", Constant(_SOAK_STEPS))
    return result
