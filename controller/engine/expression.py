"""Expressions of policies as trees, and the evaluation of what is left of them in a pending step.

`grammar` makes the trees from text, `program` splits them into terms of the past and a predicate
over the pending step.  The agent evaluates predicates too, with floats or with tensors on a device.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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
    EXP = "exp"
    """Of terms alone: the same on every device only if it is worked out in one place."""
    FINITE = "finite"
    NUMBER = "number"
    """1 for true, 0 for false."""
    ANY = "any"
    """Whether a condition holds in any layer group (or dataset)."""
    COUNT = "count"
    """In how many."""
    FIRST = "first"
    """Whether it holds in any of the first n layer groups; operands: condition, n."""


class Counter(StrEnum):
    """What is remembered of a condition from step to step."""

    TRUE = "count_true"
    """On how many of the last n - 1 observed steps it held."""
    STREAK = "consecutive"
    """On how many steps in a row, up to the last, it held."""
    AGE = "age"
    """How many steps ago it last held; steps since the first observation if it never did."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number."""

    value: float


@dataclass(frozen=True, slots=True)
class Signal:
    """The value of a signal in the pending step; of a late signal, in the step before."""

    name: str
    each: bool = False
    """Whether it is the vector over all layer groups (of dataset_loss: over all datasets)."""
    late: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """A statistic of the accepted past of a signal; the pending step is not in it."""

    statistic: str
    signal: Signal
    size: float
    """Steps of the window; of a decaying statistic, the decay."""
    at: float = 0.0
    """Of a quantile: which."""
    log: bool = False
    """Whether it is the past of the signal's logarithm."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """A counter over the past of a condition."""

    counter: Counter
    condition: "Node"
    size: int = 0


@dataclass(frozen=True, slots=True)
class Among:
    """1 for each layer group whose name matches one of the patterns, else 0."""

    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """The value of a part that does not depend on the pending step: terms[index]."""

    index: int
    each: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator over its operands."""

    operator: Operator
    operands: tuple["Node", ...]
    text: tuple[str, ...] = field(default=(), compare=False)
    """Of a comparison: how its two sides were spelled, for evidence."""


Node = Constant | Signal | Past | Tracked | Among | Term | Operation

COMPARISONS = frozenset({Operator.LT, Operator.LE, Operator.GT, Operator.GE})
OVER_LAYERS = frozenset({Operator.ANY, Operator.COUNT, Operator.FIRST})
LOGICAL = COMPARISONS | {
    Operator.AND,
    Operator.OR,
    Operator.NOT,
    Operator.FINITE,
    Operator.ANY,
    Operator.FIRST,
}
"""Operators whose value is true or false."""

Vector = tuple[float, ...]
Value = float | Vector


def is_condition(node: Node) -> bool:
    """Return whether the node's value is true or false."""
    return isinstance(node, Operation) and node.operator in LOGICAL


def is_each(node: Node) -> bool:
    """Return whether the node has one value per layer group (or dataset)."""
    match node:
        case Signal(each=each) | Past(signal=Signal(each=each)) | Term(each=each):
            return each
        case Among():
            return True
        case Operation(operator=operator, operands=operands):
            return operator not in OVER_LAYERS and any(is_each(part) for part in operands)
    return False


def walk(node: Node) -> Iterator[Node]:
    """Yield every node of a tree, conditions of counters and signals of statistics included."""
    yield node
    match node:
        case Past(signal=signal):
            yield from walk(signal)
        case Tracked(condition=condition):
            yield from walk(condition)
        case Operation(operands=operands):
            for operand in operands:
                yield from walk(operand)


def signals(node: Node) -> frozenset[Signal]:
    """Return all signals that the tree needs, now or in the past."""
    return frozenset(part for part in walk(node) if isinstance(part, Signal))


def pending(node: Node) -> frozenset[Signal]:
    """Return the signals of the pending step that the tree depends on."""
    match node:
        case Signal(late=False):
            return frozenset({node})
        case Operation(operands=operands):
            return frozenset().union(*(pending(operand) for operand in operands))
    return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a predicate is evaluated on: numbers, or float64 tensors that stay on their device."""

    values: Mapping[str, Any]
    """Signal to value in the pending step; an absent signal is missing."""
    vectors: Mapping[str, Any] = field(default_factory=dict)
    """Signal to one value per layer group (dataset_loss: per dataset); NaN where absent."""
    terms: Any = ()
    """Term to its value."""


Evaluate = Callable[[Seen], Any]


def compiled(node: Node, *, tensors: bool = False) -> Evaluate:  # noqa: PLR0911  one a kind
    """Return a function that gives the value of a tree without Past and Tracked nodes.

    With floats and tuples of floats it needs nothing but Python.  With `tensors`, all values,
    vectors and terms are float64 tensors, the result is one too, and nothing is read back to the
    host.  Both do the same IEEE 754 operations in the same order, so they agree to the last bit.

    Raises (the function):
        KeyError: If a signal is absent.
    """
    match node:
        case Constant(value=value):
            return lambda _: value
        case Signal(name=name, each=True):
            return lambda seen: seen.vectors[name]
        case Signal(name=name):
            return lambda seen: seen.values[name]
        case Term(index=index):
            return lambda seen: seen.terms[index]
        case Operation(operator=operator, operands=operands):
            parts = [compiled(operand, tensors=tensors) for operand in operands]
            if tensors:
                return _applied(_ON_TENSORS[operator], parts)
            if operator in OVER_LAYERS:
                return _applied(_OVER_VECTORS[operator], parts)
            if operator in (Operator.AND, Operator.OR):
                operands_each = [is_each(operand) for operand in operands]
                return _joined(operator, parts, operands_each)
            return _applied(lifted(operator, operands), parts)
    raise TypeError(f"{node} is not split into terms and a predicate")


def _applied(apply: Callable[..., Any], parts: list[Evaluate]) -> Evaluate:
    match parts:
        case [only]:
            return lambda seen: apply(only(seen))
        case [left, right]:
            return lambda seen: apply(left(seen), right(seen))
    return lambda seen: apply(*(part(seen) for part in parts))


def lifted(operator: Operator, operands: tuple[Node, ...]) -> Callable[..., Any]:
    """Return the operation on floats, element by element where operands are vectors."""
    apply = _ON_FLOATS[operator]
    match [is_each(operand) for operand in operands]:
        case [True]:
            return lambda xs: tuple([apply(x) for x in xs])
        case [True, True]:
            return lambda xs, ys: tuple([apply(x, y) for x, y in zip(xs, ys, strict=True)])
        case [True, False]:
            return lambda xs, y: tuple([apply(x, y) for x in xs])
        case [False, True]:
            return lambda x, ys: tuple([apply(x, y) for y in ys])
    return apply


def _joined(operator: Operator, parts: list[Evaluate], each: list[bool]) -> Evaluate:
    """Return `and` or `or`; every part is evaluated, since one absent signal is enough."""
    combine = all if operator is Operator.AND else any
    if not any(each):
        return lambda seen: combine([part(seen) for part in parts])

    def of_vectors(seen: Seen) -> tuple[bool, ...]:
        values = [part(seen) for part in parts]
        size = next(len(v) for v, vector in zip(values, each, strict=True) if vector)
        columns = [v if vector else (v,) * size for v, vector in zip(values, each, strict=True)]
        return tuple([combine(row) for row in zip(*columns, strict=True)])

    return of_vectors


def _divide(left: Any, right: Any) -> Any:
    """Return the quotient as IEEE 754 has it; Python's floats raise on a zero divisor."""
    if isinstance(right, float) and right == 0.0 and isinstance(left, float):
        if left == 0.0 or math.isnan(left):
            return math.nan
        return math.copysign(math.inf, left) * math.copysign(1.0, right)
    return left / right


def _exponential(x: float) -> float:
    """Return e to the x, infinite where it is too large for a float."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


_ON_FLOATS: dict[Operator, Callable[..., Any]] = {
    Operator.NOT: lambda x: not x,
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
    Operator.EXP: _exponential,
    Operator.FINITE: math.isfinite,
    Operator.NUMBER: float,
}
_OVER_VECTORS: dict[Operator, Callable[..., Any]] = {
    Operator.ANY: any,
    Operator.COUNT: lambda held: float(sum(held)),
    Operator.FIRST: lambda held, n: any(held[: int(n)]),
}


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


# Methods that every tensor has: this module must not import torch.
_ON_TENSORS: dict[Operator, Callable[..., Any]] = (
    _ON_FLOATS
    | {
        Operator.AND: _all,
        Operator.OR: _any,
        Operator.NOT: lambda x: x ^ True,
        Operator.FINITE: lambda x: x - x == 0,
        Operator.NUMBER: lambda x: x * 1.0,  # of a bool too: conditions may be constant
        Operator.ANY: lambda held: held.any(),
        Operator.COUNT: lambda held: held.double().sum(),
        Operator.FIRST: lambda held, n: held[: int(n)].any(),
    }
)
