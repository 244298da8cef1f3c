"""One training run of the demo.  Started by torchrun on every rank; rank 0 records each step.

torchrun --standalone --nproc-per-node 2 -m trimtab.demo.train --cause E --record e.jsonl --guarded
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from trimtab.agent import Guard
from trimtab.agent.probe.applied import Applied
from trimtab.demo import workload


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cause", choices=sorted(workload.CAUSES), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, one a step")
    parser.add_argument("--guarded", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo")
    try:
        with args.record.open("w") if dist.get_rank() == 0 else nullcontext() as record:
            train(args.cause, args.seed, args.steps, record, guarded=args.guarded)
    finally:
        dist.destroy_process_group()


def train(cause: str, seed: int, steps: int, record: TextIO | None, *, guarded: bool) -> None:
    """Train, write one line a step and a last one with the validation loss."""
    data = workload.corpus()
    model = DistributedDataParallel(workload.ByteGPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.LR, fused=True)
    scheduler = LambdaLR(optimizer, lambda step: workload.lr_multiple(cause, step))
    rows = slice(dist.get_rank(), None, dist.get_world_size())

    def load(index: int) -> tuple[int, Tensor, Tensor]:
        inputs, targets = workload.training_batch(data, cause, seed, index)
        return index, inputs[rows], targets[rows]

    turns: Iterator[tuple[int, tuple[int, Tensor, Tensor]]]
    observe: Callable[[Tensor], None]
    if guarded:
        guard = Guard(model, optimizer, scheduler=scheduler, loader=load)
        turns, observe = guard.steps(steps), guard.observe
        seen: Callable[[], dict[str, Any]] = lambda: _seen(guard)  # noqa: E731
    else:
        turns = ((index, load(index)) for index in range(steps))
        observe, seen = _unguarded(optimizer)

    for step, (index, inputs, targets) in turns:
        loss = workload.loss_of(model, inputs, targets)
        torch.autograd.backward(loss)
        observe(loss)
        optimizer.step()
        line = {"step": step, "index": index, **seen()}
        scheduler.step()
        optimizer.zero_grad()
        _write(record, line)
    _write(record, {"validation_loss": workload.validation_loss(model.module, data)})


def _seen(guard: Guard) -> dict[str, Any]:
    if guard.observation is None:  # only if measuring failed; the guard has said why
        return {"loss": math.nan, "update_norm": math.nan, "vetoed": False}
    values = guard.observation.values
    return {
        "loss": values["loss"],
        "update_norm": values["update_norm"],
        "vetoed": guard.observation.verdict.kind == "veto",
    }


def _unguarded(
    optimizer: torch.optim.Optimizer,
) -> tuple[Callable[[Tensor], None], Callable[[], dict[str, Any]]]:
    """Return what measures a run that nothing guards: its job-wide loss and update norm."""
    applied = Applied()
    line: dict[str, Any] = {"vetoed": False}

    def observe(loss: Tensor) -> None:
        mean = loss.detach().clone() / dist.get_world_size()
        dist.all_reduce(mean)
        line["loss"] = float(mean)

    def before(*_: Any) -> None:
        applied.before(
            (0, 1.0, p.detach().reshape(-1)) for g in optimizer.param_groups for p in g["params"]
        )

    def after(*_: Any) -> None:
        line["update_norm"] = math.sqrt(float(applied.after(1)))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return observe, lambda: dict(line)


def _write(record: TextIO | None, line: dict[str, Any]) -> None:
    if record is not None:
        record.write(json.dumps(line) + "\n")
        record.flush()


if __name__ == "__main__":
    main()
