"""What each optimizer's pending update is made of: exact for those listed in ADAPTERS.

Decoupled weight decay is left out of the update: it does not depend on the batch.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.agent.probe.formula import Coefficients, Form

Group = Mapping[str, Any]
State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Adapter:
    """How to read the pending update of one kind of optimizer."""

    form: Callable[[Group], Form]
    """Of a parameter group."""
    coefficients: Callable[[Group, State, float], Coefficients]
    """Of a parameter: (its group, its state before the step, the LR)."""
    exp_avg: str = "exp_avg"
    """Key of the first moment in the state."""


def adapter_for(optimizer: torch.optim.Optimizer) -> Adapter | None:
    """Return the adapter of an optimizer's class, or of one whose `step` it inherits."""
    step = inspect.unwrap(type(optimizer).step)
    kinds: tuple[Any, ...] = type(optimizer).__mro__
    for kind in kinds:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in ADAPTERS and inspect.unwrap(kind.step) is step:
            return ADAPTERS[name]
    return None


def _sign(group: Group) -> float:
    return -1.0 if group.get("maximize", False) else 1.0


def _decay(group: Group) -> float:
    coupled = not group.get("decoupled_weight_decay", False)
    return float(group["weight_decay"]) if coupled else 0.0


def _next_step(state: State) -> float:
    return float(state["step"]) + 1.0 if "step" in state else 1.0


def _adam_form(group: Group) -> Form:
    return Form(
        exp_avg=True,
        exp_avg_sq=True,
        max_exp_avg_sq=bool(group.get("amsgrad", False)),
        decay=_decay(group) != 0.0,
    )


def _moments(group: Group) -> dict[str, float]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return {
        "grad": _sign(group),
        "decay": _decay(group),
        "m_m": beta1,
        "m_g": 1.0 - beta1,
        "v_v": beta2,
        "v_g": 1.0 - beta2,
        "eps": float(group["eps"]),
    }


def _adam(group: Group, state: State, lr: float) -> Coefficients:
    step = _next_step(state)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return Coefficients(
        **_moments(group),
        u_m=lr / (1.0 - beta1**step),
        root=1.0 / math.sqrt(1.0 - beta2**step),
        add=float(group["eps"]),
    )


def _nadam(group: Group, state: State, lr: float) -> Coefficients:
    step = _next_step(state)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decay = float(group["momentum_decay"])
    mu, mu_next = (beta1 * (1.0 - 0.5 * 0.96 ** (at * decay)) for at in (step, step + 1.0))
    product = float(state.get("mu_product", 1.0)) * mu
    return Coefficients(
        **_moments(group),
        u_m=lr * mu_next / (1.0 - product * mu_next),
        u_g=lr * (1.0 - mu) / (1.0 - product),
        root=1.0 / math.sqrt(1.0 - beta2**step),
        add=float(group["eps"]),
    )


def _radam(group: Group, state: State, lr: float) -> Coefficients:
    step = _next_step(state)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    u_m, correction = lr / (1.0 - beta1**step), 1.0 - beta2**step
    longest = 2.0 / (1.0 - beta2) - 1.0
    length = longest - 2.0 * step * beta2**step / correction
    if length <= 5.0:  # the variance of v is not tractable yet: plain momentum
        return Coefficients(**_moments(group), u_m=u_m, root=0.0, add=1.0)
    rectified = math.sqrt(
        (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
    )
    return Coefficients(
        **_moments(group),
        u_m=u_m * rectified * math.sqrt(correction),
        add=float(group["eps"]),
    )


def _sgd_form(group: Group) -> Form:
    return Form(exp_avg=float(group["momentum"]) != 0.0, decay=_decay(group) != 0.0)


def _sgd(group: Group, state: State, lr: float) -> Coefficients:
    momentum, dampening = float(group["momentum"]), float(group["dampening"])
    nesterov = bool(group["nesterov"])
    first = state.get("momentum_buffer") is None  # the buffer begins as the gradient itself
    if momentum == 0.0:
        return Coefficients(grad=_sign(group), decay=_decay(group), u_g=lr)
    return Coefficients(
        grad=_sign(group),
        decay=_decay(group),
        m_m=momentum,
        m_g=1.0 if first else 1.0 - dampening,
        u_m=lr * (momentum if nesterov else 1.0),
        u_g=lr if nesterov else 0.0,
    )


def _lion_form(_: Group) -> Form:
    return Form(exp_avg=True, sign=True)


def _lion(group: Group, _: State, lr: float) -> Coefficients:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return Coefficients(m_m=beta2, m_g=1.0 - beta2, u_m=beta1, u_g=1.0 - beta1, root=lr)


ADAPTERS = {
    "torch.optim.adam.Adam": Adapter(_adam_form, _adam),
    "torch.optim.adamw.AdamW": Adapter(_adam_form, _adam),
    "torch.optim.nadam.NAdam": Adapter(_adam_form, _nadam),
    "torch.optim.radam.RAdam": Adapter(_adam_form, _radam),
    "torch.optim.sgd.SGD": Adapter(_sgd_form, _sgd, exp_avg="momentum_buffer"),
    "lion_pytorch.lion_pytorch.Lion": Adapter(_lion_form, _lion),
}
"""Class of an optimizer to its adapter.  Another library's class of the same name is not known."""
