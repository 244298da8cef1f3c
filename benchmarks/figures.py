"""How every benchmark tells its figures: a table for people, a line of JSON each for machines."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number and its goal."""

    figure: str
    value: float
    unit: str
    goal: float | None = None
    better: str = "lower"

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal


def show(figures: Sequence[Figure], *, as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        for figure in figures:
            print(json.dumps(asdict(figure) | {"value": round(figure.value, 4), "met": figure.met}))
        return
    table = Table("figure", "value", "unit", "goal", "met")
    for figure in figures:
        goal = "-" if figure.goal is None else f"{figure.goal:g}"
        met = {True: "yes", False: "no", None: "-"}[figure.met]
        table.add_row(figure.figure, f"{figure.value:.3f}", figure.unit, goal, met)
    Console().print(table)
