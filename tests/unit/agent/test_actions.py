"""Actions change what they say, for as long as they say, and nothing else."""

import math

import pytest
import torch
from optimizers import OPTIMIZERS, Make, bytes_of, parameters, set_gradients

from trimtab.agent.actions.scale_lr import LrFactor
from trimtab.agent.actions.skip_batch import Veto

VETOED = OPTIMIZERS | {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("poison", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("make", VETOED.values(), ids=VETOED)
def test_a_vetoed_step_leaves_every_byte_as_it_was(make: Make, poison: float) -> None:
    params, twins = parameters(), parameters()
    optimizer, twin = make(params), make(twins)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(twins, step)
        optimizer.step()
        twin.step()
    set_gradients(params, 3)
    for parameter in params:
        assert parameter.grad is not None
        parameter.grad *= poison
    before = bytes_of(params, optimizer)
    veto = Veto(optimizer)
    veto.arm()
    optimizer.step()
    veto.disarm()
    assert bytes_of(params, optimizer) == before  # gradients included
    # and the run goes on as if the step had never been
    set_gradients(params, 4)
    set_gradients(twins, 4)
    optimizer.step()
    twin.step()
    assert bytes_of(params, optimizer) == bytes_of(twins, twin)


def test_a_veto_of_the_very_first_step_leaves_the_optimizer_as_new() -> None:
    for name in ("adamw", "adamw-fused"):
        params = parameters()
        optimizer = OPTIMIZERS[name](params)
        set_gradients(params, 0)
        before = [p.detach().clone() for p in params]
        veto = Veto(optimizer)
        veto.arm()
        optimizer.step()
        veto.disarm()
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        assert all(not t.any() for s in optimizer.state.values() for t in s.values())


def test_a_veto_leaves_a_scalers_own_found_inf_alone() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw-fused"](params)
    own = torch.zeros(())
    optimizer.found_inf = own  # type: ignore[attr-defined]
    veto = Veto(optimizer)
    veto.arm()
    veto.disarm()
    assert optimizer.found_inf is own  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["adamw", "tensor-lr", "two-groups"])
def test_a_factor_scales_the_applied_update_and_the_groups_keep_their_lr(name: str) -> None:
    steps = []
    for factor in (1.0, 0.25):
        params = parameters()
        optimizer = OPTIMIZERS[name](params)
        own = [group["lr"] for group in optimizer.param_groups]
        set_gradients(params, 0)
        before = [p.detach().clone() for p in params]
        scaled = LrFactor(optimizer)
        scaled.apply(factor)
        optimizer.step()
        scaled.undo()
        assert all(g["lr"] is lr for g, lr in zip(optimizer.param_groups, own, strict=True))
        steps.append([p.detach() - b for p, b in zip(params, before, strict=True)])
    for whole, quarter in zip(*steps, strict=True):
        assert torch.allclose(quarter, whole / 4, rtol=1e-3, atol=1e-7)


def test_no_scheduler_overwrites_a_factor() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    factors = LrFactor(optimizer)
    factors.add(0.1, step=0, over_steps=0)
    seen = []
    for step in range(3):
        set_gradients(params, step)
        factors.apply(factors.at(step))
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        factors.undo()
        scheduler.step()
    assert seen == pytest.approx([1e-3, 5e-4, 2.5e-4])


def test_factors_compose_and_end_by_themselves() -> None:
    factors = LrFactor(OPTIMIZERS["adamw"](parameters()))
    factors.add(0.5, step=10, over_steps=5)
    factors.add(0.5, step=12, over_steps=0)
    assert [factors.at(step) for step in (10, 14, 15, 1000)] == [0.25, 0.25, 0.5, 0.5]


def test_a_factor_that_would_freeze_the_run_is_refused_with_the_floor() -> None:
    factors = LrFactor(OPTIMIZERS["adamw"](parameters()))
    factors.add(0.1, step=0, over_steps=0)
    assert factors.refusal(0.2, step=1) == ""
    assert "least is 0.01" in factors.refusal(0.05, step=1)
