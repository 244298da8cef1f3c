"""The expression language: one line of Python's spelling to a typed tree.

Only whitelisted syntax is accepted; nothing is ever run as Python.  Called by the loader.
"""

import ast
import difflib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.controller.engine.expression import (
    Constant,
    Counter,
    Node,
    Operation,
    Operator,
    Past,
    Signal,
    Tracked,
    is_condition,
    is_each,
    pending,
)
from trimtab.controller.engine.series import MAX_WINDOW_STEPS
from trimtab.controller.engine.signals import DATASET_LOSS, SIGNALS, of_dataset

MAX_LENGTH = 2000
"""Longest expression in characters; a rule nobody can read is no rule, and parsing stays cheap."""

MAX_DEPTH = 50
"""Deepest nesting of an expression; it bounds the recursion over the tree on both sides."""


class ExpressionError(Exception):
    """What is wrong with an expression, and the 0-based character at which it is wrong."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


def parse(text: str, *, condition: bool, own_signals: frozenset[str] = frozenset()) -> Node:
    """Return the tree of an expression.

    Args:
        text: One line, such as `zscore(loss, 128) > 4 and any_layer(update_norm > 2)`.
        condition: Whether it must be true or false (`when`) or a number (an argument).
        own_signals: User-defined signals that the policy declares.

    Raises:
        ExpressionError: Naming the place, what is wrong there and the nearest right name.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters", MAX_LENGTH)
    try:
        with warnings.catch_warnings(action="ignore"):  # `1if` is legal, and warned of on stderr
            tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        # CPython gives offset 0 for "the text ended too soon".
        offset = error.offset - 1 if error.offset else len(text)
        raise ExpressionError(f"not an expression: {error.msg}", offset) from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError(f"not an expression: {error}", 0) from None
    node = _Parser(text, own_signals).node(tree.body, 0)
    if is_condition(node) != condition:
        wanted = "a condition, such as loss > 3" if condition else "a number, not a condition"
        raise ExpressionError(f"must be {wanted}", 0)
    return node


@dataclass(frozen=True, slots=True)
class _LogScore:
    """`zscore(signal, n, scale=log)`: stands only on one side of a comparison."""

    signal: Signal
    center: Past
    spread: Past


class _Parser:
    """Translates one expression; keeps its text for places and evidence."""

    def __init__(self, text: str, own_signals: frozenset[str]) -> None:
        self.text = text
        self.names = [*SIGNALS, *sorted(own_signals)]
        self.own_signals = own_signals
        self.over = ""
        """Inside any_layer and its like: what the vectors are over, "layer" or "dataset"."""
        self.tracking = ""
        """Inside count_true and its like: which."""

    def node(self, tree: ast.expr, depth: int) -> Node:  # noqa: C901, PLR0911  one case a kind
        if depth > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels", tree)
        match tree:
            case ast.Constant(value=bool() | str() | bytes() | complex() | None):
                raise self.error(f"{tree.value!r} is not a number", tree)
            case ast.Constant(value=int() | float() as value):
                return self.constant(value, tree)
            case ast.Name() | ast.Subscript():
                return self.signal(tree)
            case ast.BoolOp(op=op, values=values):
                operator = Operator.AND if isinstance(op, ast.And) else Operator.OR
                return Operation(operator, tuple(self.boolean(v, depth) for v in values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Operation(Operator.NOT, (self.boolean(operand, depth),))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self.number(operand, depth)
                if isinstance(number, Constant):
                    return Constant(-number.value)
                return Operation(Operator.NEG, (number,))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                sides = (self.number(left, depth), self.number(right, depth))
                return Operation(_ARITHMETIC[type(op)], sides)
            case ast.Compare():
                return self.chain(tree, depth)
            case ast.Call(func=ast.Name(id=name)):
                found = self.call(name, tree, depth)
                if isinstance(found, _LogScore):
                    raise self.error(
                        "a zscore with scale=log is compared at once, as in"
                        " zscore(loss, 64, scale=log) > 4",
                        tree,
                    )
                return found
        raise self.error(f"{type(tree).__name__} is not part of the language", tree)

    def constant(self, value: float, tree: ast.expr) -> Constant:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.error("a number this large cannot be compared with", tree)
        return Constant(number)

    def boolean(self, tree: ast.expr, depth: int) -> Node:
        node = self.node(tree, depth + 1)
        if not is_condition(node):
            raise self.error("and, or, not need conditions, such as loss > 3", tree)
        return node

    def number(self, tree: ast.expr, depth: int) -> Node:
        node = self.node(tree, depth + 1)
        if is_condition(node):
            raise self.error("a number is needed here, not a condition", tree)
        return node

    def signal(self, tree: ast.expr) -> Signal:
        match tree:
            case ast.Name(id=name) if name in self.own_signals:
                return Signal(name, late=True)
            case ast.Name(id=name):
                info = SIGNALS[self.known(name, self.names, "signal", tree)]
                if name == DATASET_LOSS:
                    if self.over != "dataset":
                        raise self.error(
                            "name a dataset, dataset_loss[web], or ask any_dataset(...)", tree
                        )
                    return Signal(name, each=True)
                each = self.over == "layer" and info.layered
                return Signal(name, each=each, late=info.late)
            case ast.Subscript(
                value=ast.Name(id="dataset_loss"),
                slice=ast.Name(id=name) | ast.Constant(value=str(name)),
            ):
                return Signal(of_dataset(name))
        raise self.error("a signal is needed here, such as loss or dataset_loss[web]", tree)

    def chain(self, tree: ast.Compare, depth: int) -> Node:
        sides = [tree.left, *tree.comparators]
        parts = []
        for left, op, right in zip(sides, tree.ops, sides[1:], strict=False):
            if type(op) not in _COMPARISON:
                raise self.error("compare with <, <=, > or >=", right)
            parts.append(self.comparison(left, _COMPARISON[type(op)], right, depth))
        return parts[0] if len(parts) == 1 else Operation(Operator.AND, tuple(parts))

    def comparison(
        self, left: ast.expr, operator: Operator, right: ast.expr, depth: int
    ) -> Operation:
        scores = [self.log_score(side, depth) for side in (left, right)]
        match scores:
            case [None, None]:
                sides = (self.number(left, depth), self.number(right, depth))
                return Operation(operator, sides, (self.segment(left), self.segment(right)))
            case [_LogScore() as score, None]:
                return self.log_comparison(score, operator, left, right, depth)
            case [None, _LogScore() as score]:
                return self.log_comparison(score, _MIRRORED[operator], right, left, depth)
        raise self.error("only one side can be a zscore with scale=log", right)

    def log_comparison(
        self, score: _LogScore, operator: Operator, side: ast.expr, other: ast.expr, depth: int
    ) -> Operation:
        """Turn a comparison of a log score into one of the signal with a threshold."""
        bound = self.number(other, depth)
        if pending(bound):
            raise self.error("a zscore with scale=log needs a bound from the past", other)
        reach = Operation(Operator.MUL, (bound, score.spread))
        threshold = Operation(Operator.EXP, (Operation(Operator.ADD, (score.center, reach)),))
        text = f"{self.segment(side)} of {self.segment(other)}"
        return Operation(
            Operator.AND,
            (
                Operation(operator, (score.signal, threshold), (score.signal.name, text)),
                Operation(Operator.GT, (score.signal, Constant(0.0)), (score.signal.name, "0")),
            ),
        )

    def log_score(self, tree: ast.expr, depth: int) -> _LogScore | None:
        match tree:
            case ast.Call(func=ast.Name(id="zscore"), keywords=keywords) if any(
                keyword.arg == "scale" for keyword in keywords
            ):
                found = self.call("zscore", tree, depth)
                return found if isinstance(found, _LogScore) else None
        return None

    def call(self, name: str, tree: ast.Call, depth: int) -> Node | _LogScore:
        self.known(name, list(FUNCTIONS), "function", tree)
        if tree.keywords and name != "zscore":
            raise self.error(f"{name} takes no named arguments", tree.keywords[0].value)
        if name in _OVER:
            return self.over_vectors(name, tree, depth)
        if name in list(Counter):
            return self.tracked(Counter(name), tree, depth)
        if name in ("abs", "finite"):
            if len(tree.args) != 1:
                raise self.error(f"{name} takes one value: {FUNCTIONS[name]}", tree)
            return Operation(Operator(name), (self.number(tree.args[0], depth),))
        return self.statistic(name, tree)

    def over_vectors(self, name: str, tree: ast.Call, depth: int) -> Node:
        operator, over = _OVER[name]
        first = operator is Operator.FIRST
        if self.over:
            raise self.error(f"{name} cannot stand inside another of its kind", tree)
        if len(tree.args) != (2 if first else 1):
            raise self.error(f"{name} takes: {FUNCTIONS[name]}", tree)
        operands: tuple[Node, ...] = ()
        if first:
            operands = (Constant(float(self.whole(tree.args[0], 1, 100_000))),)
        self.over = over
        inner = self.boolean(tree.args[-1], depth)
        self.over = ""
        leaves = {part for part in _leaves(inner) if is_each(part)}
        if not leaves:
            kinds = "dataset_loss" if over == "dataset" else "a signal that layer groups have"
            raise self.error(f"{name} needs {kinds} inside", tree)
        # An element that is unknown matches nothing, also not under `not`.
        known = tuple(Operation(Operator.FINITE, (leaf,)) for leaf in sorted(leaves, key=repr))
        return Operation(operator, (Operation(Operator.AND, (inner, *known)), *operands))

    def tracked(self, counter: Counter, tree: ast.Call, depth: int) -> Node:
        if self.over or self.tracking:
            inside = "any_layer and its like" if self.over else self.tracking
            raise self.error(f"{counter} cannot stand inside {inside}", tree)
        windowed = counter is Counter.TRUE
        if len(tree.args) != (2 if windowed else 1):
            raise self.error(f"{counter} takes: {FUNCTIONS[counter]}", tree)
        self.tracking = counter
        condition = self.boolean(tree.args[0], depth)
        self.tracking = ""
        now = Operation(Operator.NUMBER, (condition,))
        if windowed:
            size = self.whole(tree.args[1], 2, MAX_WINDOW_STEPS)
            return Operation(Operator.ADD, (Tracked(counter, condition, size), now))
        if counter is Counter.AGE:
            now = Operation(Operator.NUMBER, (Operation(Operator.NOT, (condition,)),))
        one_more = Operation(Operator.ADD, (Tracked(counter, condition), Constant(1.0)))
        return Operation(Operator.MUL, (one_more, now))

    def statistic(self, name: str, tree: ast.Call) -> Node | _LogScore:
        if len(tree.args) != (3 if name == "quantile" else 2):
            raise self.error(f"{name} takes: {FUNCTIONS[name]}", tree)
        signal = self.signal(tree.args[0])
        method, scale = self.options(tree) if name == "zscore" else ("", "")
        if method == "ewma" or name in ("ewma", "ewstd"):
            size = self.decay(tree.args[1])
        else:
            least = 1 if name in ("lag", "delta") else 2
            size = float(self.whole(tree.args[1], least, MAX_WINDOW_STEPS))
        if name == "zscore":
            center, spread = _SCORES[method]
            if scale:
                spread = "log_spread" if spread == "spread" else spread
                return _LogScore(
                    signal,
                    Past(center, signal, size, 0.0, True),
                    Past(spread, signal, size, 0.0, True),
                )
            distance = Operation(Operator.SUB, (signal, Past(center, signal, size)))
            return Operation(Operator.DIV, (distance, Past(spread, signal, size)))
        if name == "rise":
            return Operation(Operator.DIV, (signal, Past("median", signal, size)))
        if name == "delta":
            return Operation(Operator.SUB, (signal, Past("lag", signal, size)))
        at = self.share(tree.args[2]) if name == "quantile" else 0.0
        return Past(name, signal, size, at)

    def options(self, tree: ast.Call) -> tuple[str, str]:
        """Return `method` and `scale` of a zscore."""
        found = {"method": "median", "scale": ""}
        allowed = {"method": list(_SCORES), "scale": ["log"]}
        for keyword in tree.keywords:
            name = self.known(keyword.arg or "**", list(allowed), "option", keyword.value)
            match keyword.value:
                case ast.Name(id=word) | ast.Constant(value=str(word)):
                    found[name] = self.known(word, allowed[name], name, keyword.value)
                case _:
                    raise self.error(f"{name} is one of: {', '.join(allowed[name])}", keyword.value)
        return found["method"], found["scale"]

    def whole(self, tree: ast.expr, least: int, most: int) -> int:
        match tree:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() as size) if least <= size <= most:
                return size
        reason = ": memory and replay time grow with it" if most == MAX_WINDOW_STEPS else ""
        raise self.error(f"a whole number from {least} to {most} is needed here{reason}", tree)

    def decay(self, tree: ast.expr) -> float:
        most = 1.0 - 1.0 / MAX_WINDOW_STEPS
        match tree:
            case ast.Constant(value=float() as decay) if 0.0 < decay <= most:
                return decay
        raise self.error(f"a decay per step over 0 and up to {most:.5g} is needed here", tree)

    def share(self, tree: ast.expr) -> float:
        match tree:
            case ast.Constant(value=int() | float() as q) if (
                not isinstance(q, bool) and 0 <= q <= 1
            ):
                return float(q)
        raise self.error("a share from 0 to 1 is needed here, such as 0.9", tree)

    def known(self, name: str, names: list[str], kind: str, tree: ast.expr) -> str:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
            raise self.error(f"unknown {kind} {name!r} ({hint})", tree)
        return name

    def segment(self, tree: ast.expr) -> str:
        return ast.get_source_segment(self.text, tree) or ""

    def error(self, message: str, tree: ast.expr) -> ExpressionError:
        # ast counts lines, and UTF-8 bytes in them; people count characters from the start.
        lines = self.text.splitlines(keepends=True) or [""]
        before = sum(len(line) for line in lines[: tree.lineno - 1])
        line = lines[min(tree.lineno, len(lines)) - 1]
        return ExpressionError(
            message, before + len(line.encode()[: tree.col_offset].decode(errors="ignore"))
        )


_ARITHMETIC: dict[type[ast.operator], Operator] = {
    ast.Add: Operator.ADD,
    ast.Sub: Operator.SUB,
    ast.Mult: Operator.MUL,
    ast.Div: Operator.DIV,
}
_COMPARISON: dict[type[ast.cmpop], Operator] = {
    ast.Lt: Operator.LT,
    ast.LtE: Operator.LE,
    ast.Gt: Operator.GT,
    ast.GtE: Operator.GE,
}
_MIRRORED = {
    Operator.LT: Operator.GT,
    Operator.LE: Operator.GE,
    Operator.GT: Operator.LT,
    Operator.GE: Operator.LE,
}
_OVER = {
    "any_layer": (Operator.ANY, "layer"),
    "count_layers": (Operator.COUNT, "layer"),
    "first_layers": (Operator.FIRST, "layer"),
    "any_dataset": (Operator.ANY, "dataset"),
}
_SCORES = {
    "median": ("median", "spread"),
    "mean": ("mean", "sigma"),
    "ewma": ("ewma", "ewsigma"),
}
"""Method of a zscore to its centre and scale."""

FUNCTIONS: dict[str, str] = {
    "median": "median(loss, 64), the median of the last 64 accepted values",
    "mad": "mad(loss, 64), the median absolute deviation from the median",
    "spread": "spread(loss, 64), the robust sigma: 1.4826 mad, at least 0.2 % of the median",
    "mean": "mean(loss, 64), the arithmetic mean",
    "std": "std(loss, 64), the population standard deviation",
    "min": "min(loss, 64), the least value",
    "max": "max(loss, 64), the greatest value",
    "quantile": "quantile(update_norm, 128, 0.9), interpolated between neighbours",
    "baseline": "baseline(ratio_dip, 1000), a slow reference: the median of 1000 accepted values"
    " before the newest 100",
    "slope": "slope(loss, 128), of the least-squares line, in units per accepted step",
    "lag": "lag(loss, 10), the value that was accepted 10 values ago",
    "delta": "delta(loss, 10), the pending value less lag(loss, 10)",
    "ewma": "ewma(grad_norm, 0.97), the mean with weights that decay by 0.97 a step",
    "ewstd": "ewstd(grad_norm, 0.97), the standard deviation with the same weights",
    "rise": "rise(grad_norm, 64), the pending value over its median",
    "zscore": "zscore(loss, 64), the pending value's distance from its median in spreads;"
    " method=mean: in standard deviations from the mean; method=ewma, with a decay in place of 64;"
    " scale=log: of logarithms",
    "count_true": "count_true(loss > 3, 20), on how many of the last 20 steps, this one included",
    "consecutive": "consecutive(loss > 3), on how many steps in a row it held, this one included",
    "age": "age(loss > 3), steps since it last held, 0 if it holds now",
    "any_layer": "any_layer(update_norm > 2 * median(update_norm, 64)), in any layer group",
    "count_layers": "count_layers(ratio_dip > 0.05) >= 2, in how many layer groups",
    "first_layers": "first_layers(4, below_eps_fraction > 0.5), in any of the first 4 layer groups",
    "any_dataset": "any_dataset(dataset_loss > 1.5 * median(dataset_loss, 64))",
    "abs": "abs(x), the absolute value",
    "finite": "finite(x), neither NaN nor infinite",
}
"""Function to an example and its meaning."""


def _leaves(node: Node) -> Iterator[Node]:
    """Yield the signals and statistics that a value is made of; not the signal of a statistic."""
    if isinstance(node, Operation):
        for operand in node.operands:
            yield from _leaves(operand)
    elif isinstance(node, Signal | Past):
        yield node
