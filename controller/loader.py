"""Policy files: YAML text to an engine policy, or a list of errors with file, line and column.

Called by the CLI and the gateway.  PyYAML gives the places, pydantic checks the shape, the engine
parses the expressions; this module turns what any of them dislikes into one kind of message.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trimtab.controller.actions import OBSERVE_ONLY, Reader
from trimtab.controller.document import Document, Place, PolicyError, Problem
from trimtab.controller.engine.expression import Node, Past, walk
from trimtab.controller.engine.model import ARMED_ACTIONS, REFLEX, Mode
from trimtab.controller.engine.policy import Limit, Policy, Rule, Rung
from trimtab.controller.engine.signals import SIGNALS
from trimtab.controller.shape import (
    DefaultsShape,
    LimitsShape,
    PolicyShape,
    RuleShape,
    limit,
    near,
)

MAX_POLICY_BYTES = 1_000_000
"""Largest policy file that is read."""

RUNG_LIMIT = Limit(count=1, window_steps=1000)
"""Of a rung of a ladder that does not say otherwise."""


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        PolicyError: If it cannot be read, is too large or no UTF-8.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise PolicyError(str(path), [Problem(0, 0, f"{error.strerror}")]) from None
    if len(raw) > MAX_POLICY_BYTES:
        raise PolicyError(str(path), [Problem(0, 0, f"larger than {MAX_POLICY_BYTES} bytes")])
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise PolicyError(str(path), [Problem(0, 0, f"not UTF-8: {error.reason}")]) from None


def load_policy(path: Path) -> Policy:
    """Return the policy in a file.

    Raises:
        PolicyError: With every problem that was found.
    """
    return parse_policy(read_text(path), str(path))


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
    parsed = _Bodies(document, content).read()
    try:
        shape = PolicyShape.model_validate(content)
    except ValidationError as error:
        document.problems += [_problem(document, e) for e in error.errors()]
        raise PolicyError(name, document.problems) from None
    rules = tuple(_rules(document, shape, parsed))
    _check_causes(document, shape)
    if document.problems:
        raise PolicyError(name, document.problems)
    return Policy(
        version=hashlib.sha256(text.encode()).hexdigest()[:12],
        text=text,
        name=name,
        summary=shape.summary,
        sources=tuple(shape.sources),
        rules=rules,
        expires_steps=shape.expires,
        rebaseline_steps=shape.rebaseline,
        rearm_on=shape.rearm_on,
        run_limit=shape.limits.run,
        cause_limits=shape.limits.causes,
        own_signals=shape.signals,
    )


_SHAPE_OF: dict[str, type[BaseModel]] = {
    "defaults": DefaultsShape,
    "rules": RuleShape,
    "limits": LimitsShape,
}


def _problem(document: Document, error: Any) -> Problem:
    """Return pydantic's complaint in our words, at its place."""
    path: Place = tuple(error["loc"])
    kind, message = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        key = str(path[-1])
        shape = _SHAPE_OF.get(str(path[0]) if len(path) > 1 else "", PolicyShape)
        keys = [field.alias or name for name, field in shape.model_fields.items()]
        document.report(document.keys[path], f"unknown key {key!r} ({near(key, keys)})")
    elif kind == "missing":
        document.at(path[:-1], f"key {path[-1]!r} is missing")
    elif kind in ("string_pattern_mismatch", "string_too_long") and path[-1] == "name":
        value = error["input"]
        document.at(path, f"a name is kebab-case and short, such as loss-spike: {value!r}")
    else:
        document.at(path, message[0].lower() + message[1:])
    return document.problems.pop()


@dataclass(frozen=True, slots=True)
class _Body:
    """What a rule does, read apart from its shape, so that one look tells all problems."""

    when: Node
    text: str
    rungs: tuple[tuple[Rung, Place], ...]


class _Bodies:
    """Reads `when`, `do` and `ladder` of every rule."""

    def __init__(self, document: Document, content: dict[str, Any]) -> None:
        own = content.get("signals")
        self._document = document
        self._rules = content.get("rules")
        self._reader = Reader(document, frozenset(own) if isinstance(own, dict) else frozenset())

    def read(self) -> dict[int, _Body]:
        """Return the bodies of the rules that have one."""
        return {
            index: self._body(entry, ("rules", index))
            for index, entry in enumerate(self._rules if isinstance(self._rules, list) else [])
            if isinstance(entry, dict) and "when" in entry and "do" in entry
        }

    def _body(self, entry: dict[str, Any], at: Place) -> _Body:
        when = self._reader.expression(entry["when"], (*at, "when"), condition=True)
        first = Rung(do=tuple(self._reader.actions(entry["do"], (*at, "do"))), limit=RUNG_LIMIT)
        rungs = [(first, (*at, "do")), *self._ladder(entry.get("ladder"), (*at, "ladder"))]
        return _Body(when, " ".join(str(entry["when"]).split()), tuple(rungs))

    def _ladder(self, ladder: Any, at: Place) -> Iterator[tuple[Rung, Place]]:
        if ladder is None:
            return
        if not isinstance(ladder, list) or not ladder:
            self._document.at(at, "a ladder is a list of actions, one entry a rung")
            return
        for index, entry in enumerate(ladder):
            place, its_limit = (*at, index), RUNG_LIMIT
            if isinstance(entry, dict) and "limit" in entry:
                try:
                    its_limit = limit(entry["limit"])
                except ValueError as error:
                    self._document.at((*place, "limit"), str(error))
                entry = {key: value for key, value in entry.items() if key != "limit"}  # noqa: PLW2901
            yield Rung(do=tuple(self._reader.actions(entry, place)), limit=its_limit), place


def _rules(document: Document, shape: PolicyShape, bodies: dict[int, _Body]) -> Iterator[Rule]:
    names: set[str] = set()
    if not shape.rules:
        document.at(("rules",), "a policy needs at least one rule")
    for own in shape.signals:
        if own in SIGNALS:
            document.at(("signals", own), f"signal {own!r} is built in")
    for index, entry in enumerate(shape.rules):
        at: Place = ("rules", index)
        if entry.name in names or entry.name == REFLEX:
            taken = "is built in" if entry.name == REFLEX else "stands twice"
            document.at((*at, "name"), f"name {entry.name!r} {taken}")
        names.add(entry.name)
        body = bodies[index]
        _check_actions(document, entry, body)
        _check_for(document, shape, entry, body, at)
        yield _rule(entry, shape.defaults, body)


def _rule(entry: RuleShape, defaults: DefaultsShape, body: _Body) -> Rule:
    first = Rung(do=body.rungs[0][0].do, limit=entry.limit or defaults.limit)
    hold_off = defaults.hold_off if entry.hold_off is None else entry.hold_off
    return Rule(
        name=entry.name,
        when=body.when,
        text=body.text,
        rungs=(first, *(rung for rung, _ in body.rungs[1:])),
        for_steps=entry.for_,
        after_steps=defaults.after if entry.after is None else entry.after,
        cooldown_steps=defaults.cooldown if entry.cooldown is None else entry.cooldown,
        recover_within_steps=entry.recover_within or defaults.recover_within,
        mode=entry.mode,
        hold_off=hold_off,
        labels=entry.labels,
        layers=entry.layers,
        summary=entry.summary,
    )


def _check_actions(document: Document, entry: RuleShape, body: _Body) -> None:
    for rung, place in body.rungs:
        for call in rung.do:
            if entry.mode is Mode.ACT and call.action in OBSERVE_ONLY:
                document.at(
                    place,
                    f"{call.action} can only be observed in this version of trimtab: add"
                    " `mode: observe`",
                )
        if sum(call.action in ARMED_ACTIONS for call in rung.do) > 1:
            document.at(place, "skip_batch and clip_update exclude one another")


def _check_for(
    document: Document, shape: PolicyShape, entry: RuleShape, body: _Body, at: Place
) -> None:
    """Refuse a rule that can never decide: what it flags is the new level before `for` is over."""
    compares = any(isinstance(part, Past) for part in walk(body.when))
    if compares and entry.for_ > shape.rebaseline:
        document.at(
            (*at, "for"),
            f"for: {entry.for_} steps cannot be reached: after `rebaseline: {shape.rebaseline}"
            " steps` the values that match are the new level; raise rebaseline or lower for",
        )


def _check_causes(document: Document, shape: PolicyShape) -> None:
    causes = {entry.labels.get("cause") for entry in shape.rules}
    for cause in shape.limits.causes:
        if cause not in causes:
            known = sorted(cause for cause in causes if cause)
            document.at(
                ("limits", "causes", cause),
                f"no rule has the label cause: {cause} ({near(cause, known)})"
                if known
                else f"no rule has the label cause: {cause}",
            )
