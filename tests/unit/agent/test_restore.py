"""Restore points bring back a state from which the run goes on bit for bit as it did."""

import random

import torch

from trimtab.agent.data import Position
from trimtab.agent.restore import RestoreRing, restore_rng


def run_of(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, object]]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return model, optimizer, {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(model: torch.nn.Module, parts: dict[str, object], steps: int) -> list[float]:
    optimizer, scheduler = parts["optimizer"], parts["scheduler"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 6) + random.random()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_the_run_goes_on_from_a_point_bit_for_bit() -> None:
    model, optimizer, parts = run_of()
    ring = RestoreRing(parts, budget_bytes=1 << 30)
    train(model, parts, 5)
    ring.save(5, Position(7))
    first = train(model, parts, 10)
    for _ in range(2):  # a point can be used again: nothing trains on its tensors
        point = ring.load(5)
        restore_rng(point)
        assert (point.step, point.position.index) == (5, 7)
        assert train(model, parts, 10) == first
    assert optimizer.param_groups[0]["lr"] < 1e-2


def test_parameters_stay_the_same_tensors() -> None:
    model, _, parts = run_of()
    ring = RestoreRing(parts, budget_bytes=1 << 30)
    ring.save(0, Position(0))
    before = [id(p) for p in model.parameters()]
    ring.load(0)
    assert [id(p) for p in model.parameters()] == before


def test_the_budget_decides_how_many_points_are_kept() -> None:
    model, _, parts = run_of()
    ring = RestoreRing(parts, budget_bytes=1 << 30)
    train(model, parts, 1)
    ring.save(0, Position(0))
    small = RestoreRing(parts, budget_bytes=3 * ring.size_bytes)
    for step in range(0, 50, 10):
        small.save(step, Position(step))
    assert [point.step for point in small.points] == [20, 30, 40]
    assert small.steps_before(35) == [30, 20]


def test_a_step_that_comes_again_has_one_point_the_newer_one() -> None:
    _, _, parts = run_of()
    ring = RestoreRing(parts, budget_bytes=1 << 30)
    for step, index in ((0, 0), (10, 10), (20, 20), (10, 17)):
        ring.save(step, Position(index))
    assert [(point.step, point.position.index) for point in ring.points] == [(0, 0), (10, 17)]


def test_a_point_that_is_loaded_forgets_the_newer_ones() -> None:
    _, _, parts = run_of()
    ring = RestoreRing(parts, budget_bytes=1 << 30)
    for step in (0, 10, 20):
        ring.save(step, Position(step))
    ring.load(10)
    assert [point.step for point in ring.points] == [0, 10]
