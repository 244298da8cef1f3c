"""The expression language of policies: `when` and the arguments of actions.

`parse` turns text into a typed tree, `fold` replaces what is known by constants, `evaluate` gives
the value of what is left.  Only whitelisted syntax is accepted; nothing is ever run as Python.
"""

import ast
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trimtab.controller.engine.series import MAX_WINDOW_STEPS
from trimtab.controller.engine.signals import SIGNALS

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


class Operator(StrEnum):
    """What an inner node does; the value is how it is spelled."""

    AND = "and"
    OR = "or"
    NOT = "not"
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="
    ADD = "+"
    SUB = "-"
    MUL = "*"
    DIV = "/"
    NEG = "neg"
    ABS = "abs"
    FINITE = "finite"


@dataclass(frozen=True, slots=True)
class Constant:
    """A number."""

    value: float


@dataclass(frozen=True, slots=True)
class Signal:
    """The value of a signal in the pending step."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A statistic of the accepted past of a signal; the pending step is not in it."""

    statistic: str
    signal: str
    window_steps: int


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator over its operands."""

    operator: Operator
    operands: tuple["Node", ...]
    text: tuple[str, ...] = field(default=(), compare=False)
    """Of a comparison: how its two sides were spelled, for evidence."""


Node = Constant | Signal | Call | Operation

COMPARISONS = frozenset({Operator.LT, Operator.LE, Operator.GT, Operator.GE})
LOGICAL = frozenset({Operator.AND, Operator.OR, Operator.NOT, Operator.FINITE}) | COMPARISONS
"""Operators whose value is true or false."""


def parse(text: str, *, condition: bool) -> Node:
    """Return the tree of an expression.

    Args:
        text: One line in Python's spelling, such as `zscore(loss, 128) > 4 and lr > 0`.
        condition: Whether it must be true or false (`when`) or a number (an argument).

    Raises:
        ExpressionError: Naming the place, what is wrong there and the nearest right name.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters", MAX_LENGTH)
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        # CPython gives offset 0 for "the text ended too soon".
        offset = error.offset - 1 if error.offset else len(text)
        raise ExpressionError(f"not an expression: {error.msg}", offset) from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError(f"not an expression: {error}", 0) from None
    node = _Parser(text).node(tree.body, 0)
    if is_condition(node) != condition:
        wanted = "a condition, such as loss > 3" if condition else "a number, not a condition"
        raise ExpressionError(f"must be {wanted}", 0)
    return node


def is_condition(node: Node) -> bool:
    """Return whether the node's value is true or false."""
    return isinstance(node, Operation) and node.operator in LOGICAL


class _Parser:
    """Translates one expression; keeps its text for places and evidence."""

    def __init__(self, text: str) -> None:
        self.text = text

    def node(self, tree: ast.expr, depth: int) -> Node:  # noqa: C901, PLR0911  one case a kind
        if depth > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels", tree)
        match tree:
            case ast.Constant(value=bool() | str() | bytes() | complex() | None):
                raise self.error(f"{tree.value!r} is not a number", tree)
            case ast.Constant(value=int() | float() as value):
                return self.constant(value, tree)
            case ast.Name(id=name):
                return Signal(self.known(name, SIGNALS, "signal", tree))
            case ast.BoolOp(op=op, values=values):
                operator = Operator.AND if isinstance(op, ast.And) else Operator.OR
                return Operation(operator, tuple(self.boolean(v, depth) for v in values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Operation(Operator.NOT, (self.boolean(operand, depth),))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Operation(Operator.NEG, (self.number(operand, depth),))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                sides = (self.number(left, depth), self.number(right, depth))
                return Operation(_ARITHMETIC[type(op)], sides)
            case ast.Compare():
                return self.comparison(tree, depth)
            case ast.Call(func=ast.Name(id=name)):
                return self.call(name, tree, depth)
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

    def comparison(self, tree: ast.Compare, depth: int) -> Node:
        sides = [tree.left, *tree.comparators]
        parts = []
        for left, op, right in zip(sides, tree.ops, sides[1:], strict=False):
            if type(op) not in _COMPARISON:
                raise self.error("compare with <, <=, > or >=", right)
            operands = (self.number(left, depth), self.number(right, depth))
            text = (self.segment(left), self.segment(right))
            parts.append(Operation(_COMPARISON[type(op)], operands, text))
        return parts[0] if len(parts) == 1 else Operation(Operator.AND, tuple(parts))

    def call(self, name: str, tree: ast.Call, depth: int) -> Node:
        self.known(name, FUNCTIONS, "function", tree)
        if tree.keywords:
            raise self.error(f"{name} takes no named arguments", tree.keywords[0].value)
        if name in _ELEMENTWISE:
            if len(tree.args) != 1:
                raise self.error(f"{name} takes one value: {FUNCTIONS[name]}", tree)
            return Operation(_ELEMENTWISE[name], (self.number(tree.args[0], depth),))
        match tree.args:
            case [
                ast.Name(id=signal) as at,
                ast.Constant(value=int() as size) as number,
            ]:
                self.known(signal, SIGNALS, "signal", at)
                return self.windowed(name, signal, size, number)
        raise self.error(f"{name} takes a signal and a number of steps: {FUNCTIONS[name]}", tree)

    def windowed(self, name: str, signal: str, size: int, tree: ast.expr) -> Node:
        if isinstance(size, bool) or not 2 <= size <= MAX_WINDOW_STEPS:
            reason = "one value has no spread, and memory and replay time grow with the window"
            raise self.error(f"a window has 2 to {MAX_WINDOW_STEPS} steps ({reason})", tree)
        median = Call("median", signal, size)
        if name == "rise":
            return Operation(Operator.DIV, (Signal(signal), median))
        if name == "zscore":
            distance = Operation(Operator.SUB, (Signal(signal), median))
            return Operation(Operator.DIV, (distance, Call("spread", signal, size)))
        return Call(name, signal, size)

    def known(self, name: str, names: Mapping[str, str], kind: str, tree: ast.expr) -> str:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
            raise self.error(f"unknown {kind} {name!r} ({hint})", tree)
        return name

    def segment(self, tree: ast.expr) -> str:
        return ast.get_source_segment(self.text, tree) or ""

    def error(self, message: str, tree: ast.expr) -> ExpressionError:
        # ast counts UTF-8 bytes, people count characters
        return ExpressionError(message, len(self.text.encode()[: tree.col_offset].decode()))


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
_ELEMENTWISE = {"abs": Operator.ABS, "finite": Operator.FINITE}

FUNCTIONS: dict[str, str] = {
    "median": "median(loss, 64), the median of the last 64 accepted values",
    "mad": "mad(loss, 64), the median absolute deviation from the median",
    "mean": "mean(loss, 64)",
    "std": "std(loss, 64), the population standard deviation",
    "min": "min(loss, 64)",
    "max": "max(loss, 64)",
    "spread": "spread(loss, 64), the robust sigma: 1.4826 mad, at least 0.2 % of the median",
    "rise": "rise(grad_norm, 64), the pending value over its median",
    "zscore": "zscore(loss, 64), the pending value's distance from its median in spreads",
    "abs": "abs(x)",
    "finite": "finite(x), neither NaN nor infinite",
}
"""Function to an example and its meaning."""

Statistic = Callable[[str, str, int], float | None]
"""(statistic, signal, window_steps) -> value, or None while it is not known."""


def calls(node: Node) -> frozenset[Call]:
    """Return every windowed statistic in the tree."""
    match node:
        case Call():
            return frozenset({node})
        case Operation(operands=operands):
            return frozenset().union(*(calls(operand) for operand in operands))
    return frozenset()


def signals(node: Node) -> frozenset[str]:
    """Return the names of all signals that the tree needs, now or in the past."""
    match node:
        case Signal(name=name) | Call(signal=name):
            return frozenset({name})
        case Operation(operands=operands):
            return frozenset().union(*(signals(operand) for operand in operands))
    return frozenset()


def fold(node: Node, statistic: Statistic) -> Node | None:
    """Return the residual: the tree with all that does not depend on the pending step worked out.

    None when a statistic it needs is not known yet.  Folding does the same float64 operations in
    the same order as `evaluate`, so that a residual and its full rule agree to the last bit.
    """
    match node:
        case Call(statistic=name, signal=signal, window_steps=size):
            value = statistic(name, signal, size)
            return None if value is None else Constant(value)
        case Operation(operator=operator, operands=operands):
            folded = tuple(fold(operand, statistic) for operand in operands)
            if any(operand is None for operand in folded):
                return None
            residual = Operation(operator, tuple(o for o in folded if o is not None), node.text)
            if operator not in LOGICAL and all(isinstance(o, Constant) for o in residual.operands):
                return Constant(evaluate(residual, {}))
            return residual
    return node


def evaluate(node: Node, values: Mapping[str, Any]) -> Any:
    """Return the value of a residual for the values of the pending step.

    The values are floats, or 0-dim float64 tensors that stay where they are: the result is then a
    tensor too, and nothing is read back to the host.

    Raises:
        KeyError: If a signal is absent.
    """
    match node:
        case Constant(value=value):
            return value
        case Signal(name=name):
            return values[name]
        case Operation(operator=operator, operands=operands):
            return _APPLY[operator](*(evaluate(operand, values) for operand in operands))
    raise TypeError(f"{node} is not folded")


def evidence(node: Node, values: Mapping[str, float], statistic: Statistic) -> tuple[str, ...]:
    """Return one line per comparison of a condition: both sides as spelled, with their values."""
    if not isinstance(node, Operation):
        return ()
    if node.operator not in COMPARISONS:
        lines = (evidence(operand, values, statistic) for operand in node.operands)
        return tuple(line for part in lines for line in part)
    sides = []
    for text, operand in zip(node.text, node.operands, strict=True):
        residual = fold(operand, statistic)
        known = residual is not None and signals(residual) <= values.keys()
        value = f"{evaluate(residual, values):.6g}" if residual and known else "unknown"
        sides.append(text if isinstance(operand, Constant) else f"{text} = {value}")
    return (f"{sides[0]} {node.operator} {sides[1]}",)


def _divide(left: Any, right: Any) -> Any:
    # Python floats raise on a zero divisor; tensors and IEEE 754 give inf or NaN.
    if isinstance(right, float) and right == 0.0 and isinstance(left, float):
        if left == 0.0 or math.isnan(left):
            return math.nan
        return math.copysign(math.inf, left) * math.copysign(1.0, right)
    return left / right


def _all(*conditions: Any) -> Any:
    result = conditions[0]
    for condition in conditions[1:]:
        result = result & condition
    return result


def _any(*conditions: Any) -> Any:
    result = conditions[0]
    for condition in conditions[1:]:
        result = result | condition
    return result


# `&`, `|`, `^ True` and `x - x == 0` mean the same for Python values and for tensors.
_APPLY: dict[Operator, Callable[..., Any]] = {
    Operator.AND: _all,
    Operator.OR: _any,
    Operator.NOT: lambda x: x ^ True,
    Operator.LT: lambda x, y: x < y,
    Operator.LE: lambda x, y: x <= y,
    Operator.GT: lambda x, y: x > y,
    Operator.GE: lambda x, y: x >= y,
    Operator.ADD: lambda x, y: x + y,
    Operator.SUB: lambda x, y: x - y,
    Operator.MUL: lambda x, y: x * y,
    Operator.DIV: _divide,
    Operator.NEG: lambda x: -x,
    Operator.ABS: abs,
    Operator.FINITE: lambda x: x - x == 0,
}
