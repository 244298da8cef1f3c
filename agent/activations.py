"""Activations of each layer group, by forward hooks, in the steps that are sketched.  Optional."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.agent.groups import plain_name


class Activations:
    """Mean and largest absolute output of the module that each layer group is named after."""

    def __init__(self, model: nn.Module, groups: Sequence[str], due: Callable[[], bool]) -> None:
        """Hook into the modules.

        Args:
            model: Searched for modules with the name of a layer group.
            groups: Names of the layer groups.
            due: Whether the step that is being computed is one to measure.
        """
        self._due = due
        self._groups = len(groups)
        self._found: dict[int, list[tuple[Tensor, Tensor, int]]] = {}
        rows = {name: row for row, name in enumerate(groups)}
        self._hooks = [
            module.register_forward_hook(self._hook(rows[plain]))
            for name, module in model.named_modules()
            if (plain := plain_name(f"{name}.")[:-1]) in rows and name
        ]

    @property
    def hooked(self) -> int:
        """How many modules are watched."""
        return len(self._hooks)

    def taken(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what was seen since the last call, and forget it.

        Returns:
            Sum of absolute outputs and their number, (groups, 2); the largest, (groups,), 0 where
            there were none.  Both float64.
        """
        sums = torch.zeros((self._groups, 2), dtype=torch.float64, device=device)
        largest = torch.zeros(self._groups, dtype=torch.float64, device=device)
        for row, found in self._found.items():
            for total, peak, count in found:
                sums[row, 0] += total
                sums[row, 1] += count
                largest[row] = torch.maximum(largest[row], peak)
        self._found = {}
        return sums, largest

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, row: int) -> Callable[..., None]:
        def see(module: nn.Module, _: Any, output: Any) -> None:
            if not module.training or not self._due():
                return
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point() and first.numel():
                size = first.detach().abs()
                seen = (size.sum(dtype=torch.float64), size.max().double(), size.numel())
                self._found.setdefault(row, []).append(seen)

        hidden: Callable[..., None] = torch.compiler.disable(see)  # type: ignore[no-untyped-call]
        return hidden
