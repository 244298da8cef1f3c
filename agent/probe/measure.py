"""The probe of one rank: the sums of a pending update per layer group.  Called by the guard.

Nothing is modified, and nothing the size of the model is kept: temporaries are O(CHUNK).
"""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.agent.probe.applied import Applied
from trimtab.agent.probe.formula import FIRST_SUMS, ROW, Coefficients, Form, pass_over
from trimtab.agent.probe.optimizers import Adapter, adapter_for
from trimtab.agent.probe.sums import LAYER_SIGNALS, SUMS
from trimtab.controller.engine.bins import BINS

log = logging.getLogger(__name__)

CHUNK = 1 << 17
"""Elements that run at once where nothing is compiled: a few float32 arrays fit a core's cache."""

SKETCHED_AT_ONCE = 1 << 20
"""Elements that are sketched at once where the pass is compiled: a byte each is kept meanwhile."""

BIG = 1 << 16
"""Parameters below this are put together, since a call costs more than their elements."""

COMPILED_FROM = 1 << 20
"""Local elements from which compiling (seconds, once) pays under compile="auto"."""

DEAD_AFTER_LOOKS = 10
"""Looks in a row that found the gradient of a neuron zero, after which it counts as dead."""

_AT = {name: at for at, name in enumerate(SUMS)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter counts."""

    row: int
    """Its layer group."""
    share: float
    """What each of its local elements counts for: 1 over the number of ranks that hold it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """This rank's share of a step's sums; those of all ranks add up to the job's."""

    sums: Tensor
    """float64, shape (groups, len(SUMS))."""
    sketch: Tensor | None = None
    """Elements per bin of m'/sqrt(v'), float64, shape (groups, BINS); None: not in this step."""


Key = tuple[Form, Coefficients, Place]


class Probe:
    """Measures one optimizer's pending update."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        places: Mapping[nn.Parameter, Place],
        groups: int,
        *,
        neurons: Collection[nn.Parameter] = (),
        compile: str = "auto",  # noqa: A002  the setting's name
    ) -> None:
        """Choose how to measure.

        Args:
            optimizer: The one that is measured.
            places: Every parameter of it to where it counts; others are not measured.
            groups: Number of layer groups.
            neurons: Parameters whose rows (dimension 0) are neurons, for dead_fraction.
            compile: "always", "never", or "auto": from COMPILED_FROM local elements on.
        """
        self.adapter: Adapter | None = adapter_for(optimizer)
        """How the pending update is read; None: only what was applied can be measured."""
        self._optimizer = optimizer
        self._places = places
        self._groups = groups
        self._neurons = frozenset(neurons)
        elements = sum(local(p).numel() for p in places)
        self._compiled = compile == "always" or (compile == "auto" and elements >= COMPILED_FROM)
        self._applied = Applied() if self.adapter is None else None
        self._last_applied = torch.zeros(groups, dtype=torch.float64)
        self._param_sq: Tensor | None = None
        self._quiet: dict[nn.Parameter, Tensor] = {}
        if self.adapter is None:
            log.warning(
                "trimtab: the pending update of %s cannot be worked out before it is applied"
                " (it can for %s): applied_update_norm is measured after each step; rules that need"
                " update_norm or moments stay inactive",
                type(optimizer).__name__,
                "Adam, AdamW, NAdam, RAdam, SGD, Lion",
            )

    @property
    def signals(self) -> tuple[str, ...]:
        """Signals that the sums lead to, of the job and of each layer group."""
        if self.adapter is None:
            names = {"grad_norm", "applied_update_norm", "param_norm", "dead_fraction"}
        else:
            forms = [self.adapter.form(group) for group in self._optimizer.param_groups]
            names = {"grad_norm", "update_norm", "update_ratio_norm", "param_norm", "dead_fraction"}
            if any(form.exp_avg for form in forms):
                names |= {"exp_avg_norm", "grad_momentum_cosine"}
            if any(form.exp_avg_sq for form in forms):
                names |= {"exp_avg_sq_norm", "gradient_snr", "below_eps_fraction"}
        return tuple(n for n in LAYER_SIGNALS if n in names | {"nonfinite_count"})

    @property
    def sketches(self) -> bool:
        """Whether there is a second moment to sketch."""
        return "exp_avg_sq_norm" in self.signals

    def measure(self, lr_factor: float, *, slow: bool = False) -> Measured:
        """Return the sums of the pending update on this rank.

        Args:
            lr_factor: What the LR of the groups will be multiplied with in this step.
            slow: Whether the costly ones are due: the sketch, parameter norms (which are kept
                until they are measured anew), neurons without a gradient.

        Raises:
            TypeError: For a gradient that would be measured wrongly: sparse, or not reduced yet.
        """
        device = self._device()
        sums = torch.zeros((self._groups, len(SUMS)), dtype=torch.float64, device=device)
        sketch = None
        if slow and self.sketches:
            sketch = torch.zeros((self._groups, BINS), dtype=torch.float64, device=device)
        self._run(self._pieces(lr_factor), sums, sketch)
        if slow or self._param_sq is None:
            self._param_sq = self._parameter_squares(device)
            self._look_for_dead()
        sums[:, _AT["param_sq"]] = self._param_sq
        for parameter, quiet in self._quiet.items():
            place = self._places[parameter]
            dead = (quiet >= DEAD_AFTER_LOOKS).sum().double()
            sums[place.row, _AT["dead"]] += dead * place.share
            sums[place.row, _AT["neurons"]] += quiet.numel() * place.share
        if self._applied is not None:
            sums[:, _AT["applied_sq"]] = self._last_applied.to(device)
            self._applied.before(
                (self._places[p].row, self._places[p].share, flat(p.detach()))
                for p, _ in self._with_gradient()
            )
        return Measured(sums, sketch)

    def after_step(self) -> None:
        """Compare with before the step, where the update could not be worked out in advance."""
        if self._applied is not None:
            self._last_applied = self._applied.after(self._groups)

    def forget(self) -> None:
        """Measure anew what is kept from step to step: parameters have been put back."""
        self._param_sq = None

    def _device(self) -> torch.device:
        return next((local(p).device for p in self._places), torch.device("cpu"))

    def _with_gradient(self) -> Iterator[tuple[nn.Parameter, Mapping[str, Any]]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self._places:
                    yield parameter, group

    def _pieces(self, lr_factor: float) -> Iterator[tuple[Key, list[Tensor]]]:
        """Yield the local elements of every parameter that has a gradient, flat."""
        scale = getattr(self._optimizer, "grad_scale", None)
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        for parameter, group in self._with_gradient():
            _check(parameter)
            grad = parameter.grad
            assert grad is not None  # noqa: S101  _with_gradient() leaves out those without
            elements = local(grad).numel()
            if elements == 0:
                continue
            if self.adapter is None:
                form, numbers = Form(exp_avg=False), Coefficients(grad=unscale)
                yield (form, numbers, self._places[parameter]), [flat(grad)]
                continue
            state = self._optimizer.state.get(parameter, {})
            form = self.adapter.form(group)
            numbers = self.adapter.coefficients(group, state, float(group["lr"]) * lr_factor)
            numbers = numbers._replace(grad=numbers.grad * unscale)
            tensors = []
            for name in form.inputs:
                if name == "grad":
                    tensors.append(flat(grad))
                elif name == "param":
                    tensors.append(flat(parameter.detach()))
                else:
                    kept = state.get(self.adapter.exp_avg if name == "exp_avg" else name)
                    # Before the first step there is no state; it begins with zeros.
                    tensors.append(
                        torch.zeros(1, device=local(grad).device).expand(elements)
                        if kept is None
                        else flat(kept)
                    )
            yield (form, numbers, self._places[parameter]), tensors

    def _parameter_squares(self, device: torch.device) -> Tensor:
        """Return the sum of squares of the parameters per layer group."""
        sums = torch.zeros((self._groups, len(SUMS)), dtype=torch.float64, device=device)
        form, numbers = Form(exp_avg=False), Coefficients()
        self._run(
            (((form, numbers, place), [flat(p.detach())]) for p, place in self._places.items()),
            sums,
            None,
        )
        return sums[:, _AT["grad_sq"]]

    def _run(
        self, pieces: Iterator[tuple[Key, list[Tensor]]], sums: Tensor, sketch: Tensor | None
    ) -> None:
        """Add all pieces up.  Small ones are put together, big ones are cut."""
        limit = CHUNK
        if self._compiled:
            limit = SKETCHED_AT_ONCE if sketch is not None else 1 << 62
        small: dict[Key, list[list[Tensor]]] = defaultdict(list)
        waiting: dict[Key, int] = defaultdict(int)
        for key, tensors in pieces:
            elements = tensors[0].numel()
            whole = elements // ROW * ROW if self._compiled else elements
            if elements < BIG:
                whole = 0
            for start in range(0, whole, limit):
                stop = min(whole, start + limit)
                self._add(key, [t[start:stop] for t in tensors], sums, sketch)
            if whole < elements:
                small[key].append([t[whole:] for t in tensors])
                waiting[key] += elements - whole
                if waiting[key] >= BIG:
                    self._add(key, _joined(small.pop(key)), sums, sketch)
                    waiting[key] = 0
        for key, parts in small.items():
            self._add(key, _joined(parts), sums, sketch)

    def _add(self, key: Key, tensors: list[Tensor], sums: Tensor, sketch: Tensor | None) -> None:
        form, numbers, place = key
        elements = tensors[0].numel()
        ratios = sketch is not None and form.exp_avg_sq
        padding = 0
        compiled = self._compiled
        if compiled and elements % ROW:
            if form.exp_avg_sq and numbers.add == 0.0:
                compiled = False  # what is padded with zeros would be 0/0
            else:
                padding = -elements % ROW
                tensors = [torch.nn.functional.pad(t, (0, padding)) for t in tensors]
        columns, bins = self._pass(form, tensors, numbers, ratios=ratios, compiled=compiled)
        if padding and numbers.eps > 0.0:
            columns[_AT["below_eps"]] -= padding
        row = sums[place.row]
        row[:FIRST_SUMS] += columns[:FIRST_SUMS] * place.share
        row[_AT["elements"]] += elements * place.share
        if sketch is not None and bins is not None:
            counts = torch.bincount(bins.view(-1), minlength=BINS).double()
            counts[0] -= columns[FIRST_SUMS]
            sketch[place.row] += counts * place.share

    def _pass(
        self,
        form: Form,
        tensors: list[Tensor],
        numbers: Coefficients,
        *,
        ratios: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor | None]:
        held = torch.tensor(numbers, dtype=torch.float32, device=tensors[0].device)
        if compiled:
            try:
                return _compiled(form, ratios)([t.view(-1, ROW) for t in tensors], held)
            except Exception as error:  # noqa: BLE001  no compiler, or it fails on this machine
                log.warning(
                    "trimtab: torch.compile does not work here, the probe runs uncompiled (slower):"
                    " %s",
                    str(error).strip().splitlines()[0] if str(error).strip() else repr(error),
                )
                self._compiled = False
        return pass_over(form, [t.reshape(1, -1) for t in tensors], held, ratios=ratios)

    def _look_for_dead(self) -> None:
        for parameter, _ in self._with_gradient():
            grad = parameter.grad
            if grad is None or parameter not in self._neurons or not _rows_are_whole(parameter):
                continue
            rows = local(grad)
            if rows.numel() == 0:
                continue
            silent = torch.count_nonzero(rows.flatten(1), dim=1) == 0
            before = self._quiet.get(parameter)
            if before is None:
                before = torch.zeros(rows.shape[0], dtype=torch.int32, device=rows.device)
            self._quiet[parameter] = torch.where(silent, before + 1, 0)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: its shard, if it is a DTensor."""
    to_local = getattr(tensor, "to_local", None)
    part: Tensor = tensor if to_local is None else to_local()
    return part


def flat(tensor: Tensor) -> Tensor:
    """Return this rank's part as one row; a view, unless its memory is laid out otherwise."""
    return local(tensor).detach().reshape(-1)


@functools.cache
def _compiled(form: Form, ratios: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def run(tensors: list[Tensor], numbers: Tensor) -> tuple[Tensor, Tensor | None]:
        return pass_over(form, tensors, numbers, ratios=ratios)

    for_any_size: Callable[..., tuple[Tensor, Tensor | None]] = torch.compile(
        run, dynamic=True, fullgraph=True
    )
    return for_any_size


def _joined(parts: list[list[Tensor]]) -> list[Tensor]:
    if len(parts) == 1:
        return parts[0]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _check(parameter: nn.Parameter) -> None:
    grad = parameter.grad
    assert grad is not None  # noqa: S101  only called with one
    if grad.layout is not torch.strided:
        raise TypeError(f"gradients of layout {grad.layout} are not supported (only dense ones)")
    placements = getattr(grad, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise TypeError("a DTensor gradient is not reduced yet (Partial): its norm is not known")
    if getattr(grad, "placements", None) != getattr(parameter, "placements", None):
        raise TypeError("a gradient is sharded in another way than its parameter")


def _rows_are_whole(parameter: nn.Parameter) -> bool:
    placements = getattr(parameter, "placements", ())
    return not any(p.is_shard() and p.dim != 0 for p in placements)
