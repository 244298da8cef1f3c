"""The probe of one rank: the sums of a pending update per layer group.  Called by the guard.

Nothing is modified.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.agent.probe.adding import Adder, Piece, Place
from trimtab.agent.probe.applied import Applied
from trimtab.agent.probe.formula import FIRST_SUMS, Coefficients, Form
from trimtab.agent.probe.optimizers import Adapter, adapter_for
from trimtab.agent.probe.sums import LAYER_SIGNALS, SUMS
from trimtab.controller.engine.bins import BINS

log = logging.getLogger(__name__)

COMPILED_FROM = 1 << 20
"""Local elements from which compiling (seconds, once) pays under compile="auto"."""

DEAD_AFTER_LOOKS = 10
"""Looks in a row that found the gradient of a neuron zero, after which it counts as dead."""

_AT = {name: at for at, name in enumerate(SUMS)}

_NO_STATE: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Measured:
    """This rank's share of a step's sums; those of all ranks add up to the job's."""

    sums: Tensor
    """float64, shape (groups, len(SUMS))."""
    sketch: Tensor | None = None
    """Elements per bin of m'/sqrt(v'), float64, shape (groups, BINS); None: not in this step."""
    activations: Tensor | None = None
    """Sum and number of absolute activations, float64, shape (groups, 2); None: not measured."""


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
        compiled = compile == "always" or (compile == "auto" and elements >= COMPILED_FROM)
        self._adder = Adder(groups, compiled=compiled)
        self._applied = Applied() if self.adapter is None else None
        self._last_applied = torch.zeros(groups, dtype=torch.float64)
        self._param_sq: Tensor | None = None
        self._quiet: dict[nn.Parameter, Tensor] = {}
        self._dead = torch.zeros((groups, 2), dtype=torch.float64)
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
        sketch = None
        if slow and self.sketches:
            sketch = torch.zeros((self._groups, BINS), dtype=torch.float64, device=self._device())
        with torch.no_grad():
            found = self._adder.total(self._pending(lr_factor), sketch)
            sums = nn.functional.pad(found, (0, len(SUMS) - FIRST_SUMS - 1))
            if slow or self._param_sq is None:
                self._param_sq = self._parameter_squares()
                self._look_for_dead()
        sums[:, _AT["param_sq"]] = self._param_sq
        sums[:, [_AT["dead"], _AT["neurons"]]] = self._dead.to(sums.device)
        if self._applied is not None:
            sums[:, _AT["applied_sq"]] = self._last_applied.to(sums.device)
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

    def _pending(self, lr_factor: float) -> Iterator[Piece]:
        """Yield the pending update of every parameter that has a gradient."""
        scale = getattr(self._optimizer, "grad_scale", None)
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        only_gradient = (Form(exp_avg=False), Coefficients(grad=unscale))
        adapter = self.adapter
        for group in self._optimizer.param_groups:
            # Parameters of a group nearly always share their step, and so their numbers.
            known: dict[tuple[Any, ...], Coefficients] = {}
            form = only_gradient[0] if adapter is None else adapter.form(group)
            steps = self._steps_on_device(group)
            for parameter in group["params"]:
                grad, place = parameter.grad, self._places.get(parameter)
                if grad is None or place is None:
                    continue
                _check(parameter, grad)
                grad = local(grad)
                if adapter is None:
                    yield Piece(*only_gradient, place, [grad])
                    continue
                state = self._optimizer.state.get(parameter, _NO_STATE)
                step = state.get("step")
                if parameter in steps:
                    step = steps[parameter]
                    state = {**state, "step": step}
                told = (None if step is None else float(step), "momentum_buffer" in state)
                if told not in known:
                    numbers = adapter.coefficients(group, state, float(group["lr"]) * lr_factor)
                    known[told] = numbers._replace(grad=numbers.grad * unscale)
                tensors = [grad]
                for name in form.inputs[1:]:
                    key = adapter.exp_avg if name == "exp_avg" else name
                    kept = parameter if name == "param" else state.get(key)
                    # Before the first step there is no state: it begins with zeros.
                    zeros = grad.new_zeros(1).expand(grad.shape) if kept is None else None
                    tensors.append(local(kept) if zeros is None else zeros)
                yield Piece(form, known[told], place, tensors)

    def _steps_on_device(self, group: Mapping[str, Any]) -> dict[nn.Parameter, float]:
        """Return the step counters that are on an accelerator, read at once."""
        found = {
            p: step
            for p in group["params"]
            if p.grad is not None
            and isinstance(step := self._optimizer.state.get(p, _NO_STATE).get("step"), Tensor)
            and step.device.type != "cpu"
        }
        if not found:
            return {}
        numbers = torch.stack([local(step) for step in found.values()]).tolist()
        return dict(zip(found, numbers, strict=True))

    def _parameter_squares(self) -> Tensor:
        """Return the sum of squares of the parameters per layer group."""
        form, numbers = Form(exp_avg=False), Coefficients()
        pieces = (Piece(form, numbers, place, [local(p)]) for p, place in self._places.items())
        return self._adder.total(pieces)[:, _AT["grad_sq"]]

    def _look_for_dead(self) -> None:
        """Count dead neurons and neurons per layer group, to be kept until the next look."""
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
        self._dead.zero_()
        for parameter, quiet in self._quiet.items():
            place, dead = self._places[parameter], int((quiet >= DEAD_AFTER_LOOKS).sum())
            self._dead[place.row] += torch.tensor([dead, quiet.numel()]) * place.share


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: its shard, if it is a DTensor."""
    to_local = getattr(tensor, "to_local", None)
    part: Tensor = tensor if to_local is None else to_local()
    return part


def flat(tensor: Tensor) -> Tensor:
    """Return this rank's part as one row; a view, unless its memory is laid out otherwise."""
    return local(tensor).detach().reshape(-1)


def _check(parameter: nn.Parameter, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise TypeError(f"gradients of layout {grad.layout} are not supported (only dense ones)")
    if type(grad) is Tensor:
        return
    placements = getattr(grad, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise TypeError("a DTensor gradient is not reduced yet (Partial): its norm is not known")
    if placements != getattr(parameter, "placements", ()):
        raise TypeError("a gradient is sharded in another way than its parameter")


def _rows_are_whole(parameter: nn.Parameter) -> bool:
    placements = getattr(parameter, "placements", ())
    return not any(p.is_shard() and p.dim != 0 for p in placements)
