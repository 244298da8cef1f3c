"""Small training jobs for tests: functions that run on every rank of a real gloo group."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loopback import LoopbackController
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.agent import Guard, GuardConfig
from trimtab.agent.probe.measure import Measured
from trimtab.controller.engine.model import Action, Directive

ALONE = GuardConfig(address=None, run="test", restore_every_steps=10)


def batch_of(index: int, rank: int = 0, scale: float = 1.0) -> Tensor:
    """Return rows that depend on index and rank alone, shape (8, 6)."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return scale * torch.randn(8, 6, generator=generator)


def small_run(
    config: GuardConfig = ALONE, *, fused: bool = True, loader: Any = batch_of
) -> tuple[nn.Module, torch.optim.Optimizer, Any, Guard]:
    """Return model, optimizer, scheduler and guard of a small regression."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.9)
    guard = Guard(model, optimizer, scheduler=scheduler, loader=loader, config=config)
    return model, optimizer, scheduler, guard


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss of predicting the sum of a row."""
    loss: Tensor = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
    return loss


def with_controller(guard: Guard, policy: str) -> LoopbackController:
    """Put the engine behind a guard in place of a controller."""
    controller = LoopbackController(policy, guard.layout)
    guard._channel = controller  # type: ignore[assignment]
    return controller


def snapshot_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return the bytes of parameters, moments and step counters."""
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    return [t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def rollback(before_step: int, skip: int, seq: int = 0) -> Directive:
    """Return a directive that goes back, as the engine would send it."""
    return Directive(
        id=f"rollback-{before_step}-{seq}",
        epoch=0,
        seq=seq,
        step=seq,
        expires_seq=10_000,
        rule="lost",
        action=Action.ROLLBACK,
        arguments={"before_step": float(before_step), "skip": float(skip)},
    )


def spawn(job: Callable[[int, Path], Any], ranks: int, folder: Path) -> list[Any]:
    """Run job(rank, folder) in real processes and return what each returned."""
    torch.multiprocessing.spawn(_rank, (job, ranks, folder), nprocs=ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank(rank: int, job: Callable[[int, Path], Any], ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    result = job(rank, folder)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def nan_on_one_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1's batch 20 is broken: every rank must leave every byte as it was, fused or not."""
    unchanged, kinds, observations = [], [], []
    for fused in (True, False):
        model, optimizer, scheduler, guard = small_run(fused=fused)
        for step, batch in guard.steps(30):
            if step == 20 and rank == 1:
                batch = batch * math.nan
            loss = loss_of(model, batch)
            loss.backward()
            guard.observe(loss)
            before = snapshot_of(model, optimizer)
            optimizer.step()
            if snapshot_of(model, optimizer) == before:
                unchanged.append(step)
            scheduler.step()
            optimizer.zero_grad()
            assert guard.observation is not None
            kinds.append(guard.observation.verdict.kind.value)
            observations.append(repr(guard.observation.values))
    return {"unchanged": unchanged, "kinds": kinds, "observations": observations}


BAD_BATCH = """
version: 1
defaults: {after: 0}
rules:
  - name: bad-batch
    when: loss > 50 * median(loss, 16)
    do: skip_batch
"""


def armed_veto(rank: int, folder: Path) -> dict[str, Any]:
    """Batch 50 is loud on rank 1 alone: the leader's table vetoes it on every rank."""
    model, optimizer, scheduler, guard = small_run(loader=lambda index: index)
    controller = with_controller(guard, BAD_BATCH) if rank == 0 else None
    vetoed, losses, norms = [], [], []
    for _, index in guard.steps(60):
        loud = 20.0 if index == 50 and rank == 1 else 1.0
        loss = loss_of(model, batch_of(index, rank, loud))
        loss.backward()
        guard.observe(loss)
        before = snapshot_of(model, optimizer)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        optimizer.step()
        if snapshot_of(model, optimizer) == before:
            vetoed.append(index)
        scheduler.step()
        optimizer.zero_grad()
        assert guard.observation is not None
        losses.append(guard.observation.values["loss"])
        norms.append(guard.observation.values["grad_norm"] / norm)
    mismatches = controller.state.counts["verdict_mismatch",] if controller else 0
    return {"vetoed": vetoed, "losses": losses, "norms": norms, "mismatches": mismatches}


def broken_probe_on_one_rank(rank: int, folder: Path) -> dict[str, Any]:
    """The probe raises on rank 1 at steps 5 to 9: nobody hangs, training goes on."""
    model, optimizer, scheduler, guard = small_run()
    measure, seen = guard._probe.measure, []

    def flaky(factor: float, *, slow: bool) -> Measured:
        if rank == 1 and 5 <= guard._step < 10:
            raise RuntimeError("broken probe")
        return measure(factor, slow=slow)

    guard._probe.measure = flaky  # type: ignore[method-assign]
    for _, batch in guard.steps(15):
        loss = loss_of(model, batch)
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(guard.observation.seq if guard.observation else None)
    return {"seen": seen, "failures": guard.failures}


def roll_back_everywhere(rank: int, folder: Path) -> dict[str, Any]:
    """Go back from step 37; rank 1 lacks the newest point that would do, so the older one is it."""
    model, optimizer, scheduler, guard = small_run(loader=lambda index: index)
    controller = with_controller(guard, BAD_BATCH) if rank == 0 else None
    trail: list[tuple[int, int, float]] = []
    for step, index in guard.steps(45):
        if len(trail) == 37:
            if rank == 1:
                guard._ring.points = [p for p in guard._ring.points if p.step != 30]
            if controller:
                controller.directives.append(rollback(35, skip=0))
        loss = loss_of(model, batch_of(index, rank))
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        trail.append((step, index, loss.item()))
    acks = [(a.outcome.value, a.step) for a in controller.acks] if controller else []
    return {"trail": trail, "acks": acks}


def refuse_everywhere(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 has no restore point at all: the rollback is refused and nothing is touched."""
    model, optimizer, scheduler, guard = small_run(loader=lambda index: index)
    controller = with_controller(guard, BAD_BATCH) if rank == 0 else None
    steps = []
    for step, index in guard.steps(25):
        if step == 15:
            if rank == 1:
                guard._ring.points = []
            if controller:
                controller.directives.append(rollback(14, skip=0))
        loss = loss_of(model, batch_of(index, rank))
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        steps.append((step, index))
    acks = [(a.outcome.value, a.detail) for a in controller.acks] if controller else []
    return {"steps": steps, "acks": acks}
