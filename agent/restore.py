"""Restore points: states of this rank in host memory that a rollback can return to."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.agent.data import Position

MAX_POINTS = 8
"""More points than this reach back farther than a rollback from memory is meant for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePoint:
    """Everything that decides how the run goes on from `step`."""

    step: int
    """The optimizer step that comes next."""
    position: Position
    """Where the data are."""
    states: dict[str, Any]
    """`state_dict` copies by part: model, optimizer, scheduler."""
    torch_rng: torch.Tensor
    python_rng: tuple[Any, ...]


class RestoreRing:
    """The newest restore points, oldest first, as many as the memory budget allows."""

    def __init__(self, parts: dict[str, Any], budget_bytes: int) -> None:
        """Take the parts with `state_dict` and `load_state_dict` that make up the run's state."""
        self._parts = parts
        self._budget_bytes = budget_bytes
        self.points: list[RestorePoint] = []
        self.size_bytes = 0
        """Of one point; 0 before the first."""

    @property
    def capacity(self) -> int:
        """How many points fit the budget, as far as the size of one is known."""
        return min(MAX_POINTS, self._budget_bytes // (self.size_bytes or 1))

    def save(self, step: int, position: Position) -> bool:
        """Copy the state as it is now; return whether the budget has room for a point at all.

        The oldest point goes when there are too many.
        """
        states = {name: part.state_dict() for name, part in self._parts.items()}
        self.size_bytes = sum(_size_bytes(state) for state in states.values())
        if self.capacity == 0:
            self.points = []
            return False
        # After a rollback a step comes again, with other batches behind it.
        self.points = [point for point in self.points if point.step < step]
        self.points.append(
            RestorePoint(
                step=step,
                position=position,
                states={name: _copied(state) for name, state in states.items()},
                torch_rng=torch.get_rng_state(),
                python_rng=random.getstate(),
            )
        )
        del self.points[: max(0, len(self.points) - self.capacity)]
        return True

    def steps_before(self, step: float) -> list[int]:
        """Return the steps of the points at or before `step`, newest first."""
        return [point.step for point in reversed(self.points) if point.step <= step]

    def load(self, step: int) -> RestorePoint:
        """Put the state of the point at `step` back and forget the newer ones."""
        point = next(point for point in self.points if point.step == step)
        for name, part in self._parts.items():
            # A copy: optimizers keep the tensors that they are given, and would train on ours.
            part.load_state_dict(_copied(point.states[name]))
        self.points = [p for p in self.points if p.step <= step]
        return point


def restore_rng(point: RestorePoint) -> None:
    """Put the random generators back; last of all, since loading a state may draw from them."""
    torch.set_rng_state(point.torch_rng)
    random.setstate(point.python_rng)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return nested dicts, lists and tuples with every tensor changed and all else copied."""
    match value:
        case torch.Tensor():
            return change(value)
        case dict():
            return {key: _mapped(item, change) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_mapped(item, change) for item in value)
    return copy.deepcopy(value)


def _copied(state: Any) -> Any:
    return _mapped(state, lambda tensor: tensor.detach().to("cpu", copy=True))


def _size_bytes(state: Any) -> int:
    sizes: list[int] = []
    _mapped(state, lambda tensor: sizes.append(tensor.numel() * tensor.element_size()))
    return sum(sizes)
