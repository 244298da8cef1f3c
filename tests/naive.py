"""Rules evaluated the slow way: Python's own parser, textbook statistics over plain lists."""

import ast
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from trimtab.controller.engine.series import MAD_TO_SIGMA, SPREAD_FLOOR

OVER = ("any_layer", "count_layers", "first_layers", "any_dataset")
TRACKED = ("count_true", "consecutive", "age")


class UnknownError(Exception):
    """Something that a rule needs is not known: the rule is neither true nor false."""


class NearError(Exception):
    """Two numbers so near one another that rounding decides."""


@dataclass
class Naive:
    """The past of one rule, and what it says of a pending step."""

    when: str
    layered: frozenset[str]
    late: frozenset[str]
    datasets: tuple[str, ...]
    groups: int
    truths: dict[str, list[bool]] = field(default_factory=dict)
    """Condition of a counter to whether it held, step by step."""
    last: dict[tuple[str, bool], Any] = field(default_factory=dict)
    """Late signal to its last value."""

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.when, mode="eval").body
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and node.func.id in TRACKED:  # type: ignore[attr-defined]
                self.truths[ast.unparse(node.args[0])] = []

    def holds(
        self,
        past: Mapping[tuple[str, int | None], Sequence[float]],
        values: Mapping[str, float],
        vectors: Mapping[str, Sequence[float]],
    ) -> bool:
        """Return whether the rule holds of a pending step.

        Args:
            past: (signal, position in its vector or None) to the accepted values, newest last.
            values: Signals of the pending step.
            vectors: Signals per layer group of the pending step.
        """
        self.past, self.values, self.vectors = past, values, vectors
        return bool(self._value(self.tree, "", None))

    def move_on(self) -> None:
        """Count the step that `holds` was last asked about as past."""
        healthy = all(math.isfinite(value) for value in self.values.values())
        for text, held in self.truths.items():
            try:
                now = healthy and bool(self._value(ast.parse(text, mode="eval").body, "", None))
            except UnknownError:
                now = False
            held.append(now)
        for name in self.late:
            if name in self.values:
                self.last[name, False] = self.values[name]
            if name in self.vectors:
                self.last[name, True] = self.vectors[name]

    def _signal(self, name: str, over: str, at: int | None) -> float:
        each = (over == "layer" and name in self.layered) or name == "dataset_loss"
        if name in self.late:
            if (name, each) not in self.last:
                raise UnknownError
            return self.last[name, each][at] if each else self.last[name, each]
        if name == "dataset_loss":
            assert at is not None
            return self.values.get(f"dataset_loss[{self.datasets[at]}]", math.nan)
        if each:
            if name not in self.vectors:
                raise UnknownError
            return self.vectors[name][at]  # type: ignore[index]
        if name not in self.values:
            raise UnknownError
        return self.values[name]

    def _name(self, tree: ast.expr) -> str:
        if isinstance(tree, ast.Subscript):
            return f"dataset_loss[{tree.slice.id}]"  # type: ignore[attr-defined]
        return tree.id  # type: ignore[attr-defined, no-any-return]

    def _window(self, tree: ast.expr, over: str, at: int | None) -> Sequence[float]:
        name = self._name(tree)
        each = (over == "layer" and name in self.layered) or name == "dataset_loss"
        return self.past.get((name, at if each else None), ())

    def _statistic(self, call: ast.Call, name: str, over: str, at: int | None) -> float:
        """Return a statistic; NaN for one that a layer group has not yet."""
        values = self._window(call.args[0], over, at)
        size = call.args[1].value  # type: ignore[attr-defined]
        if name in ("ewma", "ewstd"):
            weights = [size**age for age in range(len(values) - 1, -1, -1)]
            if sum(weights) * (1 - size) < 0.5:
                return math.nan
            mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            if name == "ewma":
                return mean
            spread = math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
            return math.sqrt(spread / sum(weights))
        if name == "lag":
            return values[-size] if len(values) >= size else math.nan
        if name == "baseline":
            values = values[: -max(1, size // 10)]
        last = values[-size:]
        if len(last) < (size + 1) // 2:
            return math.nan
        center = statistics.median(last)
        match name:
            case "median" | "baseline":
                return center
            case "mad":
                return statistics.median(abs(v - center) for v in last)
            case "spread":
                mad = statistics.median(abs(v - center) for v in last)
                return max(MAD_TO_SIGMA * mad, SPREAD_FLOOR * abs(center)) or math.nan
            case "mean":
                return float(sum(map(Fraction, last)) / len(last))
            case "std" | "sigma":
                mean = sum(map(Fraction, last)) / len(last)
                std = math.sqrt(sum((Fraction(v) - mean) ** 2 for v in last) / len(last))
                return std if name == "std" else std or math.nan
            case "min":
                return min(last)
            case "max":
                return max(last)
            case "quantile":
                return float(np.quantile(last, call.args[2].value))  # type: ignore[attr-defined]
            case "slope":
                if len(last) == 1:
                    return math.nan
                middle = Fraction(len(last) - 1, 2)
                rise = sum((at - middle) * Fraction(v) for at, v in enumerate(last))
                return float(rise / sum((at - middle) ** 2 for at in range(len(last))))
        raise AssertionError(name)

    def _past(self, call: ast.Call, name: str, over: str, at: int | None) -> float:
        found = self._statistic(call, name, over, at)
        each = (over == "layer" and self._name(call.args[0]) in self.layered) or self._name(
            call.args[0]
        ) == "dataset_loss"
        if math.isnan(found) and not each:
            raise UnknownError
        return found

    def _call(self, call: ast.Call, over: str, at: int | None) -> Any:
        name = call.func.id  # type: ignore[attr-defined]
        if name in OVER:
            return self._over(call, name)
        if name in TRACKED:
            held = self.truths[ast.unparse(call.args[0])]
            now = bool(self._value(call.args[0], over, at))
            if name == "count_true":
                return float(sum([*held, now][-call.args[1].value :]))  # type: ignore[attr-defined]
            wanted = name == "consecutive"
            streak = 0
            for was in reversed([*held, now]):
                if was is not wanted:
                    break
                streak += 1
            return float(streak)
        if name in ("abs", "finite"):
            value = self._value(call.args[0], over, at)
            return abs(value) if name == "abs" else math.isfinite(value)
        if name in ("zscore", "rise", "delta"):
            return self._score(call, name, over, at)
        return self._past(call, name, over, at)

    def _score(self, call: ast.Call, name: str, over: str, at: int | None) -> float:
        now = self._signal(self._name(call.args[0]), over, at)
        if name == "rise":
            return divide(now, self._past(call, "median", over, at))
        if name == "delta":
            return now - self._past(call, "lag", over, at)
        method = next((k.value.id for k in call.keywords), "median")  # type: ignore[attr-defined]
        center = {"median": "median", "mean": "mean", "ewma": "ewma"}[method]
        scale = {"median": "spread", "mean": "sigma", "ewma": "ewstd"}[method]
        spread = self._past(call, scale, over, at)
        if spread == 0:
            raise UnknownError
        return divide(now - self._past(call, center, over, at), spread)

    def _over(self, call: ast.Call, name: str) -> Any:
        over = "dataset" if name == "any_dataset" else "layer"
        count = len(self.datasets) if over == "dataset" else self.groups
        inner = call.args[-1]
        held = [
            self._known(inner, over, at) and bool(self._value(inner, over, at))
            for at in range(count)
        ]
        if name == "count_layers":
            return float(sum(held))
        return any(held[: call.args[0].value] if name == "first_layers" else held)  # type: ignore[attr-defined]

    def _known(self, inner: ast.expr, over: str, at: int) -> bool:
        """Return whether everything of this element is known; raise if a global value is not."""
        self._value(inner, over, at)
        for node in ast.walk(inner):
            if isinstance(node, ast.Name) and (
                (over == "layer" and node.id in self.layered) or node.id == "dataset_loss"
            ):
                parent = next(
                    (c for c in ast.walk(inner) if isinstance(c, ast.Call) and node in c.args), None
                )
                statistic = parent.func.id if parent else ""  # type: ignore[attr-defined]
                pending = statistic in ("", "abs", "finite", "zscore", "rise", "delta")
                if pending and not math.isfinite(self._signal(node.id, over, at)):
                    return False
                wanted = {"zscore": ("median", "spread"), "rise": ("median",), "delta": ("lag",)}
                names = wanted.get(statistic, () if pending else (statistic,))
                if parent and any(
                    math.isnan(self._statistic(parent, name, over, at)) for name in names
                ):
                    return False
        return True

    def _value(self, tree: ast.expr, over: str, at: int | None) -> Any:
        match tree:
            case ast.Constant(value=number):
                return float(number)
            case ast.Name() | ast.Subscript():
                return self._signal(self._name(tree), over, at)
            case ast.Call():
                return self._call(tree, over, at)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._value(left, over, at), self._value(right, over, at)
                return _ARITHMETIC[type(op)](a, b)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                a, b = self._value(left, over, at), self._value(right, over, at)
                decays = "ewma" in ast.unparse(tree) or "ewstd" in ast.unparse(tree)
                if abs(a - b) <= 1e-9 * max(abs(a), abs(b)) and (decays or a != b):
                    raise NearError
                return _COMPARE[type(op)](a, b)
            case ast.BoolOp(op=op, values=parts):
                held = [self._value(part, over, at) for part in parts]  # one unknown is enough
                return all(held) if isinstance(op, ast.And) else any(held)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand, over, at)
        raise AssertionError(ast.dump(tree))


def divide(left: float, right: float) -> float:
    if right == 0:
        return math.nan if left == 0 or math.isnan(left) else math.copysign(math.inf, left)
    return left / right


_ARITHMETIC: dict[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: divide,
}
_COMPARE: dict[type, Any] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
