"""Statistics of the pending update of one rank, before it is applied.  Called by the guard.

Nothing is modified and nothing the size of the model is copied: temporaries are O(CHUNK_ELEMENTS).
"""

import logging
import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 18
"""Elements worked on at once: a few float32 arrays of this size stay in a core's cache."""

SUMS = ("grad_sq", "update_sq", "exp_avg_sq", "exp_avg_sq_sq", "nonfinite")
"""What `measure` returns, in order; the first four are sums of squares."""

Tensors = list[Tensor] | tuple[Tensor, ...]

Span = tuple[torch.nn.Parameter, int, int]
"""A parameter and the first and past-the-last flat element of it."""


class Probe(Protocol):
    """Measures an optimizer's pending update."""

    signals: tuple[str, ...]
    """Signals that its sums lead to."""

    def measure(self, lr_factor: float) -> Tensor:
        """Return the float64 sums of SUMS over this rank's parameters, shape (5,).

        Args:
            lr_factor: What the LR of the groups will be multiplied with in this step.
        """
        ...


def probe_for(optimizer: torch.optim.Optimizer) -> Probe:
    """Return the exact probe of Adam and AdamW, or the one for gradients only, and say so."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        return AdamProbe(optimizer)
    log.warning(
        "%s has no probe yet (there are: Adam, AdamW): only loss, grad_norm, nonfinite_count and"
        " lr are measured, rules that need other signals stay inactive",
        type(optimizer).__name__,
    )
    return GradientProbe(optimizer)


class GradientProbe:
    """Gradient norm and non-finite count of any optimizer."""

    signals: tuple[str, ...] = ("loss", "grad_norm", "nonfinite_count", "lr")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def measure(self, lr_factor: float) -> Tensor:  # noqa: ARG002  no update to scale
        """Return the sums of SUMS; what is not measured is 0."""
        total = torch.zeros(len(SUMS), dtype=torch.float64)
        for group in self.optimizer.param_groups:
            for spans in chunks(group["params"]):
                gradients = [flat(p.grad, a, b) for p, a, b in spans]
                total += gradient_sums(gradients)
        return total


class AdamProbe:
    """Exact pending update of torch's Adam and AdamW.

    Follows the update of torch.optim.Adam: bias correction, amsgrad, coupled weight decay.
    Decoupled weight decay is left out of the update norm: it does not depend on the batch.
    """

    signals: tuple[str, ...] = (
        "loss",
        "grad_norm",
        "update_norm",
        "exp_avg_norm",
        "exp_avg_sq_norm",
        "nonfinite_count",
        "lr",
    )

    def __init__(self, optimizer: torch.optim.Adam) -> None:
        self.optimizer = optimizer

    def measure(self, lr_factor: float) -> Tensor:
        """Return the sums of SUMS."""
        total = torch.zeros(len(SUMS), dtype=torch.float64)
        for group in self.optimizer.param_groups:
            for spans in chunks(group["params"]):
                total += self._chunk(group, spans, lr_factor)
        return total

    def _chunk(self, group: dict[str, Any], spans: list[Span], lr_factor: float) -> Tensor:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        gradients: Tensors = [flat(p.grad, a, b) for p, a, b in spans]
        total = gradient_sums(gradients)
        if group["maximize"]:
            gradients = torch._foreach_neg(gradients)
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            parameters = [flat(p, a, b) for p, a, b in spans]
            decay = float(group["weight_decay"])
            gradients = torch._foreach_add(gradients, parameters, alpha=decay)
        states = [self.optimizer.state.get(p, {}) for p, _, _ in spans]
        exp_avg = [self._moment(s, "exp_avg", span) for s, span in zip(states, spans, strict=True)]
        exp_avg_sq = [
            self._moment(s, "exp_avg_sq", span) for s, span in zip(states, spans, strict=True)
        ]
        steps = [float(state["step"]) + 1.0 if state else 1.0 for state in states]

        pending_m = torch._foreach_lerp(exp_avg, gradients, 1.0 - beta1)
        pending_v = torch._foreach_mul(exp_avg_sq, beta2)
        torch._foreach_addcmul_(pending_v, gradients, gradients, 1.0 - beta2)
        total[2] = squared_norm(pending_m)
        total[3] = squared_norm(pending_v)
        if group["amsgrad"]:
            maxima = [
                self._moment(s, "max_exp_avg_sq", span)
                for s, span in zip(states, spans, strict=True)
            ]
            torch._foreach_maximum_(pending_v, maxima)

        torch._foreach_sqrt_(pending_v)
        torch._foreach_div_(pending_v, [math.sqrt(1.0 - beta2**step) for step in steps])
        torch._foreach_add_(pending_v, float(group["eps"]))
        torch._foreach_div_(pending_m, pending_v)
        lr = float(group["lr"]) * lr_factor
        torch._foreach_mul_(pending_m, [lr / (1.0 - beta1**step) for step in steps])
        total[1] = squared_norm(pending_m)
        return total

    def _moment(self, state: dict[str, Tensor], name: str, span: Span) -> Tensor:
        parameter, start, stop = span
        if name not in state:  # before the first step Adam has no state; it begins with zeros
            return torch.zeros(stop - start, dtype=torch.float32, device=parameter.device)
        return flat(state[name], start, stop)


def chunks(parameters: list[torch.nn.Parameter]) -> Iterator[list[Span]]:
    """Yield the parameters that have a gradient, in lists of at most CHUNK_ELEMENTS elements.

    Raises:
        TypeError: For a sparse or sharded gradient, which would be measured wrongly.
    """
    spans: list[Span] = []
    room = CHUNK_ELEMENTS
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if type(parameter.grad) is not Tensor or parameter.grad.layout is not torch.strided:
            kind = type(parameter.grad).__name__ + " " + str(parameter.grad.layout)
            raise TypeError(f"gradients of kind {kind} are not supported yet (only dense tensors)")
        start, size = 0, parameter.numel()
        while start < size:
            stop = min(size, start + room)
            spans.append((parameter, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield spans
                spans, room = [], CHUNK_ELEMENTS
    if spans:
        yield spans


def flat(tensor: Tensor | None, start: int, stop: int) -> Tensor:
    """Return elements start to stop of a tensor, at least in float32; a view where it can be."""
    assert tensor is not None  # noqa: S101  chunks() leaves out what has no gradient
    part = tensor.detach().reshape(-1)[start:stop]
    return part if part.dtype in (torch.float32, torch.float64) else part.float()


def gradient_sums(gradients: Tensors) -> Tensor:
    """Return SUMS with the gradient's sum of squares and its count of non-finite elements."""
    total = torch.zeros(len(SUMS), dtype=torch.float64)
    total[0] = squared_norm(gradients)
    if not math.isfinite(float(total[0])):
        total[4] = sum(int((~torch.isfinite(g)).sum()) for g in gradients)
    return total


def squared_norm(tensors: Tensors) -> Tensor:
    """Return the sum of squares as a float64 scalar; finite values never overflow to infinity."""
    total = torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    if not math.isfinite(float(total)):  # a float32 norm overflows above 1.8e19
        total = torch.stack([t.double().square().sum() for t in tensors]).sum()
    return total
