"""The pending update is measured exactly, and measuring changes nothing."""

import math

import pytest
import torch
from optimizers import OPTIMIZERS, Make, bytes_of, parameters, set_gradients

from trimtab.agent import probe as probe_module
from trimtab.agent.probe import SUMS, AdamProbe, GradientProbe, probe_for


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("chunk", [1 << 18, 16])
def test_the_pending_update_is_the_one_that_is_applied(
    make: Make, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "CHUNK_ELEMENTS", chunk)
    params = parameters()
    optimizer = make(params)
    probe = probe_for(optimizer)
    for step in range(4):
        set_gradients(params, step)
        for parameter in params if step == 3 else ():
            parameter.grad *= 0.01  # v falls: what amsgrad keeps is now more than v
        untouched = bytes_of(params, optimizer)
        sums = dict(zip(SUMS, probe.measure(1.0).tolist(), strict=True))
        assert bytes_of(params, optimizer) == untouched
        before = [p.detach().double().clone() for p in params]
        optimizer.step()
        applied = sum(
            (p.detach().double() - b).square().sum() for p, b in zip(params, before, strict=True)
        )
        states = optimizer.state.values()
        assert sums["update_sq"] == pytest.approx(float(applied), rel=1e-4)
        assert sums["grad_sq"] == pytest.approx(
            sum(float(p.grad.double().square().sum()) for p in params if p.grad is not None),
            rel=1e-6,
        )
        for name, moment in (("exp_avg_sq", "exp_avg"), ("exp_avg_sq_sq", "exp_avg_sq")):
            real = sum(float(state[moment].double().square().sum()) for state in states)
            assert sums[name] == pytest.approx(real, rel=1e-5)
        assert sums["nonfinite"] == 0


def test_the_lr_factor_scales_the_update_and_nothing_else() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    set_gradients(params, 0)
    whole, half = (probe_for(optimizer).measure(factor) for factor in (1.0, 0.5))
    assert half[1].item() == pytest.approx(whole[1].item() / 4)
    assert torch.equal(half[[0, 2, 3, 4]], whole[[0, 2, 3, 4]])


def test_every_non_finite_gradient_element_is_counted() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    set_gradients(params, 0)
    assert params[0].grad is not None and params[1].grad is not None
    params[0].grad[3, 1:4] = math.nan
    params[1].grad[0] = -math.inf
    sums = probe_for(optimizer).measure(1.0)
    assert sums[4] == 4
    assert not math.isfinite(sums[0])


def test_a_huge_finite_gradient_is_no_infinity() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    set_gradients(params, 0)
    assert params[0].grad is not None
    params[0].grad[0, 0] = 1e30
    sums = probe_for(optimizer).measure(1.0)
    assert sums[0].item() == pytest.approx(1e60)
    assert sums[4] == 0


def test_parameters_without_a_gradient_do_not_count() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    set_gradients(params[:2], 0)
    alone = OPTIMIZERS["adamw"](params[:2])
    assert torch.equal(probe_for(optimizer).measure(1.0), probe_for(alone).measure(1.0))


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    parameter.grad = torch.full((1000,), 0.01, dtype=torch.bfloat16)
    sums = probe_for(torch.optim.AdamW([parameter])).measure(1.0)
    assert sums[0].item() == pytest.approx(1000 * float(torch.tensor(0.01).bfloat16()) ** 2)


def test_another_optimizer_gets_the_gradient_alone_and_a_message_that_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = parameters()
    set_gradients(params, 0)
    probe = probe_for(torch.optim.SGD(params, lr=0.1))
    assert isinstance(probe, GradientProbe)
    assert "SGD has no probe yet (there are: Adam, AdamW)" in caplog.text
    same = AdamProbe(torch.optim.Adam(params)).measure(1.0)
    assert torch.equal(probe.measure(1.0)[[0, 4]], same[[0, 4]])


def test_a_sparse_gradient_is_refused_by_name() -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="sparse"):
        probe_for(torch.optim.SGD(embedding.parameters())).measure(1.0)
