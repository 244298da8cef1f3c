"""Optimizers over a handful of oddly shaped parameters, for tests of the agent."""

from collections.abc import Callable

import torch

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
    tensors += [t for s in optimizer.state.values() for t in s.values()]
    return [t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
