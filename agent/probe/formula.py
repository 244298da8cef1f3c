"""One pass over the elements of a pending update: every sum of it, and the sketch of m/sqrt(v).

Written once in torch operations.  Compiled where torch.compile works, it reads gradient and moments
once and keeps nothing; else it runs over chunks that fit a core's cache.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.controller.engine.bins import BINS, HIGH, LOW

ROW = 4096
"""Elements that are summed in float32 before float64 takes over: keeps sums right to 1e-7."""

FIRST_SUMS = 9
"""How many of SUMS `pass_over` returns, in their order; behind them what was in no bin."""


@dataclass(frozen=True, slots=True)
class Form:
    """What an optimizer's update is made of; one compiled function each."""

    exp_avg: bool
    exp_avg_sq: bool = False
    max_exp_avg_sq: bool = False
    """Whether the largest v so far divides (amsgrad)."""
    decay: bool = False
    """Whether weight decay is added to the gradient."""
    sign: bool = False
    """Whether only the sign of the direction counts (Lion)."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors that `pass_over` takes."""
        wanted = {
            "grad": True,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "max_exp_avg_sq": self.max_exp_avg_sq,
            "param": self.decay,
        }
        return tuple(name for name, needed in wanted.items() if needed)


class Coefficients(NamedTuple):
    """The numbers of one parameter's pending update.

    grad' = grad * g + decay * p;  m' = m_m * m + m_g * grad';  v' = v_v * v + v_g * grad'^2
    update = (u_m * m' + u_g * grad') / (root * sqrt(v') + add), without v: the numerator alone.
    """

    grad: float = 1.0
    decay: float = 0.0
    m_m: float = 0.0
    m_g: float = 0.0
    v_v: float = 0.0
    v_g: float = 0.0
    u_m: float = 0.0
    u_g: float = 0.0
    root: float = 1.0
    add: float = 0.0
    eps: float = 0.0
    bins_per_ratio: float = BINS / (HIGH - LOW)
    bin_of_zero: float = -LOW * BINS / (HIGH - LOW)


def pass_over(
    form: Form, tensors: list[Tensor], numbers: Tensor, *, row: int, ratios: int
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of a piece of an update, and the bins of m'/sqrt(v').

    Args:
        form: What is in `tensors`.
        tensors: Of `form.inputs`, each flat, of one size.
        numbers: `Coefficients`, float32, shape (13,).
        row: Elements that are summed in float32; divides the size.
        ratios: 0: no bins are wanted; n: of every n-th row.

    Returns:
        The first FIRST_SUMS of SUMS and the number of elements without a ratio (m' = v' = 0, or not
        finite), float64; the bin of each element of those rows, uint8, 0 for those without a ratio.
    """
    rows = tensors[0].shape[0] // row
    k: Any = Coefficients(*numbers.unbind())  # type: ignore[arg-type]  # tensors in their place
    shaped = [_wide(tensor.view(rows, row)) for tensor in tensors]
    given = dict(zip(form.inputs, shaped, strict=True))
    raw = given["grad"]
    grad = unscaled = raw * k.grad
    sums: dict[int, Tensor | tuple[Tensor, Tensor]] = {
        0: (grad, grad),
        7: raw - raw != 0,  # cheaper than isfinite
    }
    if form.decay:
        grad = grad + given["param"] * k.decay
    direction = grad * k.u_g
    bins = None
    if form.exp_avg:
        past = given["exp_avg"]
        exp_avg = past * k.m_m + grad * k.m_g
        direction = direction + (past if form.sign else exp_avg) * k.u_m
        sums |= {2: (exp_avg, exp_avg), 5: (unscaled, past), 6: (past, past)}
        if form.exp_avg_sq:
            exp_avg_sq = given["exp_avg_sq"] * k.v_v + grad * grad * k.v_g
            sums |= {3: (exp_avg_sq, exp_avg_sq), 4: exp_avg_sq}
            root = exp_avg_sq.sqrt()
            sums[8] = torch.minimum(unscaled.abs(), root) < k.eps
            if ratios:
                place = exp_avg[::ratios] / root[::ratios] * k.bins_per_ratio + k.bin_of_zero
                sums[FIRST_SUMS] = place != place  # noqa: PLR0124  isnan is slower
                # By way of int32, where a NaN becomes a number that is 0 as uint8.
                bins = place.clamp(0, BINS - 1).to(torch.int32).to(torch.uint8)
            if form.max_exp_avg_sq:
                root = torch.maximum(exp_avg_sq, given["max_exp_avg_sq"]).sqrt()
            direction = direction / (root * k.root + k.add)
    if form.sign:
        direction = direction.sign() * k.root
    sums[1] = (direction, direction)
    zero = torch.zeros((), dtype=torch.float64, device=raw.device)
    columns = [_summed(sums[at]) if at in sums else zero for at in range(FIRST_SUMS + 1)]
    return torch.stack(columns), bins


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _summed(values: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Return the sum of the elements, or of the products of two tensors' elements, float64."""
    if isinstance(values, tuple):
        one, other = values
        if not torch.compiler.is_compiling():
            return torch.dot(one.view(-1), other.view(-1)).double()
        values = one * other
    if values.dtype is torch.bool:
        if not torch.compiler.is_compiling():
            return torch.count_nonzero(values).double()
        values = values.float()
    return values.sum(1).double().sum()
