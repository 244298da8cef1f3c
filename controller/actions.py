"""`do` and `ladder` of a rule: which actions there are, which arguments they take.

Used by the loader, and by `schema` and `explain`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trimtab.controller.document import Document, Place
from trimtab.controller.engine.expression import Constant, Node, Operation, Operator, Past, Signal
from trimtab.controller.engine.grammar import ExpressionError, parse
from trimtab.controller.engine.model import Action
from trimtab.controller.engine.policy import ActionCall
from trimtab.controller.shape import count, near

OBSERVE_ONLY = frozenset(
    {
        Action.SET_BETAS, Action.SET_EPS, Action.ADD_GRADIENT_NOISE, Action.RESET_MOMENTS,
        Action.CHECKPOINT, Action.PAUSE, Action.HALT, Action.CALL,
    }
)  # fmt: skip
"""Actions that no job carries out yet: a rule with one of them can only observe."""

UNDO_LR_JUMP = "undo_lr_jump"
"""Another name for scale_lr by the LR's own median over its present value."""

UNDO_WINDOW_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """How one argument of an action is read."""

    read: Callable[[Any], float] | None = None
    """Of a count; None for an expression or a word."""
    words: tuple[str, ...] | None = None
    """Of a word: which there are; empty: any name."""
    default: float | str | None = None
    """None: it may be missing, or must be there."""
    needed: bool = False
    example: str = ""
    meaning: str = ""

    @property
    def is_expression(self) -> bool:
        """Whether it is a number or an expression."""
        return self.read is None and self.words is None


def _seconds(value: Any) -> float:
    found = re.fullmatch(r"(\d{1,9}) (s|min|h)", str(value).strip())
    if found is None:
        raise ValueError(f"{value!r} is no time, such as `30 min`")
    return float(int(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]])


_OVER = Argument(
    read=count("step", 1),
    default=0.0,
    example="200 steps",
    meaning="how long it stays in force; without it, until the job ends",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionInfo:
    """What an action does and takes."""

    meaning: str
    arguments: dict[str, Argument] = field(default_factory=dict)


ACTIONS: dict[Action, ActionInfo] = {
    Action.SKIP_BATCH: ActionInfo(
        meaning="does not apply the pending update: parameters, moments and step counters stay bit"
        " for bit; data and LR schedule move on"
    ),
    Action.CLIP_UPDATE: ActionInfo(
        meaning="scales the pending update down to a norm by a one-step LR factor",
        arguments={
            "to": Argument(
                needed=True, example="median(update_norm, 128)", meaning="largest norm let through"
            )
        },
    ),
    Action.SCALE_LR: ActionInfo(
        meaning="multiplies the LR from the next step on; the scheduler's own values stay",
        arguments={
            "by": Argument(needed=True, example="0.5", meaning="factor in (0, 1]"),
            "over": _OVER,
        },
    ),
    Action.SET_BETAS: ActionInfo(
        meaning="sets Adam's betas",
        arguments={
            "beta1": Argument(example="0.9", meaning="decay of the first moment"),
            "beta2": Argument(example="0.95", meaning="decay of the second moment"),
            "over": _OVER,
        },
    ),
    Action.SET_EPS: ActionInfo(
        meaning="sets Adam's eps",
        arguments={"eps": Argument(needed=True, example="1e-15", meaning="eps"), "over": _OVER},
    ),
    Action.ADD_GRADIENT_NOISE: ActionInfo(
        meaning="adds noise to the gradient, the same on replicas",
        arguments={
            "sigma": Argument(
                needed=True, example="0.01 * grad_norm", meaning="standard deviation"
            ),
            "over": _OVER,
        },
    ),
    Action.RESET_MOMENTS: ActionInfo(
        meaning="sets Adam's moments and step counters to zero, then ramps the LR up",
        arguments={
            "moments": Argument(
                words=("both", "exp_avg", "exp_avg_sq"), default="both", meaning="which moments"
            ),
            "layers": Argument(
                words=("all", "matched"), default="all", meaning="of which layer groups"
            ),
            "ramp": Argument(
                read=count("step", 0), default=100.0, example="100 steps", meaning="LR ramp"
            ),
        },
    ),
    Action.ROLLBACK: ActionInfo(
        meaning="returns every rank to its newest common restore point from before the onset, or"
        " none; the LR factor stays",
        arguments={
            "to": Argument(words=("last_good",), default="last_good", meaning="which point"),
            "skip": Argument(
                read=count("batch", 0),
                default=100.0,
                example="200 batches",
                meaning="batches to leave out from there on; 0 replays them",
            ),
            "soak": Argument(
                read=count("step", 1),
                default=20.0,
                example="20 steps",
                meaning="clean steps that must lie between the point and the onset",
            ),
        },
    ),
    Action.CHECKPOINT: ActionInfo(meaning="keeps a restore point, or lets the trainer save"),
    Action.PAUSE: ActionInfo(
        meaning="holds all ranks between two steps until a person answers",
        arguments={
            "timeout": Argument(
                read=_seconds, default=3600.0, example="30 min", meaning="longest wait"
            )
        },
    ),
    Action.HALT: ActionInfo(meaning="stops the run with an exit code of its own"),
    Action.CALL: ActionInfo(
        meaning="calls a function that the job registered, on all ranks",
        arguments={
            "name": Argument(
                words=(), needed=True, example="smaller_batch", meaning="the function's name"
            )
        },
    ),
    Action.ALERT: ActionInfo(meaning="journals, logs and counts the decision; nothing else"),
}
"""Every action."""

NAMES = sorted([*(action.value for action in ACTIONS), UNDO_LR_JUMP])


class Reader:
    """Reads actions out of a document, and reports what is wrong with them there."""

    def __init__(self, document: Document, own_signals: frozenset[str]) -> None:
        self.document = document
        self.own_signals = own_signals

    def expression(self, value: Any, at: Place, *, condition: bool) -> Node:
        """Read an expression; a wrong one is reported and stands for 0."""
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            wanted = "a condition, such as loss > 3" if condition else "a number or an expression"
            self.document.at(at, f"needs {wanted}")
            return Constant(0.0)
        try:
            return parse(str(value), condition=condition, own_signals=self.own_signals)
        except ExpressionError as error:
            hint = ""
            if "was never closed" in error.message:
                hint = " (inside {...} a comma ends the value: put it into quotes)"
            self.document.at(at, error.message + hint, error.offset)
            return Constant(0.0)

    def actions(self, do: Any, at: Place) -> Iterator[ActionCall]:
        """Read `do` or a rung: a name, a mapping of names to arguments, or a list of these."""
        seen: set[str] = set()
        for name, arguments, place in self._named(do, at):
            if name not in NAMES:
                node = self.document.values[place]
                if getattr(node, "value", None) != name:  # it is the key of its arguments
                    node = self.document.keys[place]
                self.document.report(node, f"unknown action {name!r} ({near(name, NAMES)})")
            elif name in seen:
                self.document.at(place, f"action {name!r} stands twice")
            else:
                seen.add(name)
                yield self._call(name, arguments, place)

    def _named(self, do: Any, at: Place) -> Iterator[tuple[str, Any, Place]]:
        if isinstance(do, str):
            yield do, None, at
        elif isinstance(do, dict) and do:
            for name, arguments in do.items():
                yield name, arguments, (*at, name)
        elif isinstance(do, list) and do:
            for index, entry in enumerate(do):
                if isinstance(entry, str | dict):
                    yield from self._named(entry, (*at, index))
                else:
                    self.document.at((*at, index), "needs the name of an action")
        else:
            self.document.at(at, f"needs actions; there are: {', '.join(NAMES)}")

    def _call(self, name: str, given: Any, at: Place) -> ActionCall:
        if name == UNDO_LR_JUMP:
            return self._undo_lr_jump(given, at)
        action = Action(name)
        places = {key: (*at, key) for key in given} if isinstance(given, dict) else {}
        if action is Action.CALL and isinstance(given, str):
            given, places = {"name": given}, {"name": at}
        known = ACTIONS[action].arguments
        if given is not None and not isinstance(given, dict):
            self.document.at(at, f"{action} takes a mapping of: {', '.join(known) or 'nothing'}")
            given = None
        arguments: dict[str, Node] = {}
        options: dict[str, str] = {}
        for key, value in (given or {}).items():
            read = self._argument(action, key, value, places[key])
            if isinstance(read, str):
                options[key] = read
            elif read is not None:
                arguments[key] = read
        self._complete(action, given or {}, arguments, options, at)
        self._ranges(action, arguments, at)
        texts = {key: str(value) for key, value in (given or {}).items()}
        return ActionCall(action=action, arguments=arguments, options=options, texts=texts)

    def _complete(
        self,
        action: Action,
        given: dict[str, Any],
        arguments: dict[str, Node],
        options: dict[str, str],
        at: Place,
    ) -> None:
        """Add what was not given."""
        for key, argument in ACTIONS[action].arguments.items():
            if key in given:
                continue
            if argument.needed:
                hint = f"{argument.meaning}, such as `{key}: {argument.example}`"
                self.document.at(at, f"{action} needs `{key}`, {hint}")
            elif isinstance(argument.default, float):
                arguments[key] = Constant(argument.default)
            elif isinstance(argument.default, str):
                options[key] = argument.default

    def _argument(self, action: Action, key: str, value: Any, at: Place) -> Node | str | None:
        """Return an argument: an expression, a word, or None if it is wrong."""
        known = ACTIONS[action].arguments
        if key not in known:
            hint = near(key, list(known)) if known else f"{action} takes none"
            self.document.report(self.document.keys[at], f"unknown argument {key!r} ({hint})")
            return None
        argument = known[key]
        if argument.words is not None:
            if isinstance(value, str) and (not argument.words or value in argument.words):
                return value
            choice = ", ".join(argument.words) or f"a name, such as {argument.example}"
            self.document.at(at, f"{key} must be one of: {choice}")
            return None
        if argument.read is None:
            return self.expression(value, at, condition=False)
        try:
            return Constant(float(argument.read(value)))
        except ValueError as error:
            self.document.at(at, str(error))
            return None

    def _ranges(self, action: Action, arguments: dict[str, Node], at: Place) -> None:
        """Check what is a plain number already."""
        for key, (low, high) in _RANGES.get(action, {}).items():
            match arguments.get(key):
                case Constant(value=value) if not (low < value <= high):
                    wanted = f"over {low:g}" + (f" and up to {high:g}" if high < 1e300 else "")
                    place = (*at, key)
                    self.document.at(place, f"{key} must be {wanted}, not {value:g}")

    def _undo_lr_jump(self, given: Any, at: Place) -> ActionCall:
        if given is not None:
            self.document.at(at, f"{UNDO_LR_JUMP} takes no arguments")
        lr = Signal("lr")
        by = Operation(Operator.DIV, (Past("median", lr, float(UNDO_WINDOW_STEPS)), lr))
        return ActionCall(
            action=Action.SCALE_LR,
            arguments={"by": by, "over": Constant(0.0)},
            texts={"by": f"median(lr, {UNDO_WINDOW_STEPS}) / lr"},
        )


_MAX = 1.7e308
_RANGES: dict[Action, dict[str, tuple[float, float]]] = {
    Action.CLIP_UPDATE: {"to": (0.0, _MAX)},
    Action.SCALE_LR: {"by": (0.0, 1.0)},
    Action.SET_BETAS: {"beta1": (-1e-300, 0.999999), "beta2": (-1e-300, 0.999999)},
    Action.SET_EPS: {"eps": (-1e-300, 1.0)},
    Action.ADD_GRADIENT_NOISE: {"sigma": (0.0, _MAX)},
}
"""Action to argument to (more than, at most)."""
