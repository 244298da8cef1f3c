"""Optimizers over a handful of oddly shaped parameters, for tests of the agent."""

from collections.abc import Callable

import lion_pytorch
import torch

from trimtab.agent.probe.adding import Place
from trimtab.agent.probe.measure import Probe

Parameters = list[torch.nn.Parameter]
Make = Callable[[Parameters], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, foreach=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, amsgrad=True),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adam-decay-maximize": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "two-groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "lr": 1e-1}, {"params": p[1:], "betas": (0.5, 0.9), "eps": 1e-3}],
        lr=1e-2,
        weight_decay=0.0,
    ),
    "tensor-lr": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(1e-2), weight_decay=0.0, fused=True
    ),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "nadam-decay": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "lion": lambda p: lion_pytorch.Lion(p, lr=1e-3, weight_decay=0.0),
}


def parameters() -> Parameters:
    generator = torch.Generator().manual_seed(1)
    shapes = [(37, 5), (11,), (1,), (64, 3, 2), (300,)]
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]


def set_gradients(params: Parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def bytes_of(params: Parameters, optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = [*params, *(p.grad for p in params if p.grad is not None)]
    tensors += [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return [t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def probe_of(optimizer: torch.optim.Optimizer, compiling: str = "never") -> Probe:
    """Return a probe with two layer groups, parameters taking turns."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    places = {p: Place(at % 2, 1.0) for at, p in enumerate(params)}
    neurons = [p for p in params if p.dim() == 2]
    return Probe(optimizer, places, 2, neurons=neurons, compile=compiling)
