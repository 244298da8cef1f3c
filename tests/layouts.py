"""One small transformer under every sharding, and its statistics.  Functions that run on a rank."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from trimtab.agent import Guard, GuardConfig
from trimtab.agent.probe.measure import local

STEPS = 12
WIDTH, ROWS = 10, 8
"""10 rows over 4 ranks: 3, 3, 3, 1, and a vector of 2 leaves two ranks with nothing."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(x)))
        return x + hidden * self.gain[0] + self.gain[1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def rows_of(index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    loss: Tensor = (model(rows).squeeze(1) - rows.sum(1)).square().mean()
    return loss


def plain_net() -> Net:
    torch.manual_seed(0)
    return Net().double()  # so that what differs is not the rounding of other sums


def _ddp(model: Net) -> tuple[nn.Module, int, int]:
    return DistributedDataParallel(model), dist.get_rank(), dist.get_world_size()


def _sharded(model: Net, mesh: DeviceMesh | None = None) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _fsdp2(model: Net) -> tuple[nn.Module, int, int]:
    _sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, dist.get_rank(), dist.get_world_size()


def _hsdp(model: Net) -> tuple[nn.Module, int, int]:
    half = dist.get_world_size() // 2
    _sharded(model, init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard")))
    return model, dist.get_rank(), dist.get_world_size()


def _parallel(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _tensor_parallel(model: Net) -> tuple[nn.Module, int, int]:
    _parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, 0, 1


def _fsdp2_tensor_parallel(model: Net) -> tuple[nn.Module, int, int]:
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor")
    )
    _parallel(model, mesh["tensor"])
    _sharded(model, mesh["data"])
    return model, mesh["data"].get_local_rank(), mesh["data"].size()


LAYOUTS: dict[str, Callable[[Net], tuple[nn.Module, int, int]]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tensor_parallel,
    "fsdp2-tp": _fsdp2_tensor_parallel,
}
"""Name to what wraps a net; returns it with the rank and size of the data-parallel dimension."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),  # no adapter: measured when applied
}

CONFIG = GuardConfig(address=None, run="layout", restore_every_steps=0, sketch_every_steps=1)


def statistics(guard: Guard) -> dict[str, Any]:
    """Return everything that was seen of the last step, in a form that JSON can take."""
    seen = guard.observation
    assert seen is not None
    skipped = {"step_time", "agent_overhead", "loss", "tokens", "sketch_every_steps"}
    return {
        "values": {k: v for k, v in seen.values.items() if k not in skipped},
        "vectors": {k: list(v) for k, v in seen.vectors.items()},
        "sketch": list(seen.ratio_sketch),
        "loss": seen.values["loss"],
        "tokens": seen.values.get("tokens"),
    }


def watch(
    net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, whole: int
) -> list[dict[str, Any]]:
    """Train for STEPS and return the statistics of each; `whole`: data ranks of the reference."""
    guard = Guard(net, optimizer, config=CONFIG)
    assert guard.refusal == ""
    seen = []
    for step, _ in guard.steps(STEPS):
        if size == 1:  # all the rows at once
            rows = torch.cat([rows_of(step, r) for r in range(whole)])
        else:
            rows = rows_of(step, rank)
        loss = loss_of(net, rows)
        loss.backward()
        guard.observe(loss, tokens=rows.numel())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(statistics(guard) | {"groups": list(guard.layout.layer_groups)})
    return seen


def layout_job(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Train under the layout and with the optimizer that the folder is named after."""
    layout, kind, _ = folder.name.split(".")
    net, at, size = LAYOUTS[layout](plain_net())
    return watch(net, OPTIMIZERS[kind](net.parameters()), at, size, _data_ranks(layout))


def _data_ranks(layout: str) -> int:
    size = dist.get_world_size()
    return {"tp": 1, "fsdp2-tp": size // 2}.get(layout, size)


def reference(kind: str, data_ranks: int) -> list[dict[str, Any]]:
    """Return the same of one process that holds everything."""
    net = plain_net()
    return watch(net, OPTIMIZERS[kind](net.parameters()), 0, 1, data_ranks)


def veto_job(rank: int, folder: Path) -> dict[str, Any]:
    """A batch of the last rank is broken: nothing may change anywhere, and training goes on."""
    layout, kind, _ = folder.name.split(".")
    net, at, size = LAYOUTS[layout](plain_net())
    optimizer = OPTIMIZERS[kind](net.parameters())
    guard = Guard(net, optimizer, config=CONFIG)
    unchanged, kinds = [], []
    for step, _ in guard.steps(STEPS):
        rows = rows_of(step, at) * (math.nan if step == 5 and at == size - 1 else 1.0)
        loss = loss_of(net, rows)
        loss.backward()
        guard.observe(loss)
        before = local_bytes(net, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if local_bytes(net, optimizer) == before:
            unchanged.append(step)
        assert guard.observation is not None
        kinds.append(guard.observation.verdict.kind.value)
    finite = all(bool(torch.isfinite(local(p)).all()) for p in net.parameters())
    return {"unchanged": unchanged, "kinds": kinds, "finite": finite, "failures": guard.failures}


def local_bytes(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return the bytes of this rank's parameters and optimizer state."""
    tensors = [*net.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    kept = [local(t.detach()).contiguous() for t in tensors]
    return [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in kept if t.numel()]


class Stage(nn.Module):
    """The half of a net that one pipeline rank holds, under the net's own names."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        whole = plain_net()
        self.first = rank == 0
        self.blocks = nn.ModuleDict({str(rank): whole.blocks[rank]})
        if self.first:
            self.embed = whole.embed
        else:
            self.head = whole.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        y: Tensor = x if self.first else self.head(x)
        return y


def pipeline_job(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Two stages that hand on activations and gradients; only the last one has a loss."""
    stage = Stage(rank)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    guard = Guard(stage, optimizer, config=CONFIG)
    seen = []
    for step, _ in guard.steps(STEPS):
        rows = rows_of(step, 0)
        if rank == 0:
            hidden = stage(rows)
            dist.send(hidden.detach(), 1)
            grad = torch.empty_like(hidden)
            dist.recv(grad, 1)
            hidden.backward(grad)
        else:
            hidden = torch.empty(ROWS, WIDTH, dtype=torch.float64)
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            loss = (stage(hidden).squeeze(1) - rows.sum(1)).square().mean()
            loss.backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, 0)
            guard.observe(loss, tokens=rows.numel())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(statistics(guard) | {"groups": list(guard.layout.layer_groups)})
    return seen


def refused_job(rank: int, folder: Path) -> dict[str, Any]:
    """Ranks that do not fit together: nothing is guarded, everything trains on."""
    kind = folder.name
    net: Any = plain_net()
    grouping = None
    config = CONFIG
    if kind == "stages-of-one-name" and rank == 1:
        net = plain_net()
        nn.init.ones_(net.head.weight)
    if kind == "groups" and rank == 1:
        grouping = lambda _: "all"  # noqa: E731
    if kind == "settings" and rank == 1:
        config = GuardConfig(address=None, run="layout", sketch_every_steps=7)
    if kind == "shape" and rank == 1:
        net.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    if kind == "broken" and rank == 1:
        grouping = lambda _: 1 / 0  # noqa: E731
    make = torch.optim.SGD if kind == "optimizer" and rank == 1 else torch.optim.AdamW
    optimizer = make(net.parameters(), lr=1e-2)
    guard = Guard(net, optimizer, groups=grouping, config=config)
    steps = []
    for step, _ in guard.steps(3):
        loss = loss_of(net, rows_of(step, rank))
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step)
    return {"refusal": guard.refusal, "steps": steps, "seen": guard.observation is not None}


def idle_rank_job(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Rank 1 holds nothing that is trained, and joins all the same."""
    net = plain_net()
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    if rank == 1:
        net = nn.ParameterList([extra])  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    guard = Guard(net, optimizer, config=CONFIG)
    seen = []
    for step, _ in guard.steps(STEPS):
        if rank == 0:
            loss = loss_of(net, rows_of(step, 0))
            loss.backward()
            guard.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(statistics(guard))
    return seen
