"""The pending update is measured exactly, and measuring changes nothing."""

import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from optimizers import OPTIMIZERS, Make, bytes_of, parameters, probe_of, set_gradients

from trimtab.agent.probe import adding
from trimtab.agent.probe.adding import Place
from trimtab.agent.probe.measure import DEAD_AFTER_LOOKS, Probe
from trimtab.agent.probe.sums import LAYER_SIGNALS, SUMS, signals_of
from trimtab.controller.engine.bins import BINS, HIGH, LOW


def compiles(test: Any) -> Any:
    """Mark a test that compiles, which torch 2.13 itself does with what it has deprecated."""
    test = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")(test)
    return pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")(test)


def sums_of(probe: Probe, lr_factor: float = 1.0) -> dict[str, float]:
    return dict(zip(SUMS, probe.measure(lr_factor).sums.sum(0).tolist(), strict=True))


def signals(probe: Probe, *, slow: bool = True) -> dict[str, list[float]]:
    rows = signals_of(probe.measure(1.0, slow=slow).sums).tolist()
    return dict(zip(LAYER_SIGNALS, rows, strict=True))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("chunk", [1 << 17, 16])
def test_the_pending_update_is_the_one_that_is_applied(
    make: Make, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adding, "CHUNK", chunk)
    monkeypatch.setattr(adding, "BIG", chunk)
    params = parameters()
    optimizer = make(params)
    probe = probe_of(optimizer)
    for step in range(8):  # RAdam begins to divide by sqrt(v) at the sixth
        set_gradients(params, step)
        for parameter in params if step == 3 else ():
            parameter.grad *= 0.01  # v falls: what amsgrad keeps is now more than v
        untouched = bytes_of(params, optimizer)
        past = {p: dict(s) for p, s in optimizer.state.items()}
        momenta = {
            p: m.double().clone()
            for p, s in past.items()
            if (m := s.get("exp_avg", s.get("momentum_buffer"))) is not None
        }
        sums = sums_of(probe)
        assert bytes_of(params, optimizer) == untouched
        before = [p.detach().double().clone() for p in params]
        optimizer.step()
        applied = sum(
            float((p.detach().double() - b).square().sum())
            for p, b in zip(params, before, strict=True)
        )
        grads = {p: p.grad.double() for p in params if p.grad is not None}
        states = optimizer.state.values()
        moved = [s.get("exp_avg", s.get("momentum_buffer")) for s in states]
        assert sums["update_sq"] == pytest.approx(applied, rel=2e-4)
        expected = {
            "grad_sq": sum(float(g.square().sum()) for g in grads.values()),
            "exp_avg_sq": sum(float(m.double().square().sum()) for m in moved if m is not None),
            "grad_past_exp_avg": sum(
                float((grads[p] * m).sum()) * (-1 if "maximize" in str(make) else 1)
                for p, m in momenta.items()
            ),
            "past_exp_avg_sq": sum(float(m.square().sum()) for m in momenta.values()),
            "nonfinite": 0,
            "elements": sum(p.numel() for p in params),
        }
        seconds = [s["exp_avg_sq"].double() for s in states if "exp_avg_sq" in s]
        expected["exp_avg_sq_sq"] = sum(float(v.square().sum()) for v in seconds)
        expected["exp_avg_sq_sum"] = sum(float(v.sum()) for v in seconds)
        if optimizer.param_groups[0].get("maximize"):
            del expected["grad_past_exp_avg"]
        for name, value in expected.items():
            near = 1e-6 if name == "grad_past_exp_avg" else 1e-9  # terms of either sign cancel
            assert sums[name] == pytest.approx(value, rel=2e-5, abs=near), name


def test_the_lr_factor_scales_the_update_and_nothing_else() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    set_gradients(params, 0)
    whole, half = (sums_of(probe_of(optimizer), factor) for factor in (1.0, 0.5))
    assert half.pop("update_sq") == pytest.approx(whole.pop("update_sq") / 4)
    assert half == whole


def test_every_non_finite_gradient_element_is_counted() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    set_gradients(params, 0)
    assert params[0].grad is not None and params[1].grad is not None
    params[0].grad[3, 1:4] = math.nan
    params[1].grad[0] = -math.inf
    found = signals(probe_of(optimizer))
    assert found["nonfinite_count"] == [4, 3, 1]
    assert not any(map(math.isfinite, found["grad_norm"]))


def test_parameters_without_a_gradient_do_not_count() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    set_gradients(params[:2], 0)
    alone = OPTIMIZERS["adamw"](params[:2])
    found, expected = sums_of(probe_of(optimizer)), sums_of(probe_of(alone))
    del found["param_sq"], expected["param_sq"]
    assert found == expected


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    parameter.grad = torch.full((1000,), 0.01, dtype=torch.bfloat16)
    sums = sums_of(probe_of(torch.optim.AdamW([parameter])))
    expected = 1000 * float(torch.tensor(0.01).bfloat16()) ** 2
    assert sums["grad_sq"] == pytest.approx(expected, rel=1e-6)


def test_moments_of_another_precision_than_the_parameters_are_read() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    parameter.grad = torch.full((1000,), 0.01, dtype=torch.bfloat16)
    moment = torch.full((1000,), 0.02)  # as mixed precision optimizers keep them
    optimizer.state[parameter] = {
        "step": torch.tensor(4.0),
        "exp_avg": moment,
        "exp_avg_sq": moment**2,
    }
    sums = sums_of(probe_of(optimizer))
    grad = float(torch.tensor(0.01).bfloat16())
    assert sums["exp_avg_sq"] == pytest.approx(1000 * (0.9 * 0.02 + 0.1 * grad) ** 2, rel=1e-6)


def test_layer_groups_are_kept_apart_and_replicas_count_for_their_share() -> None:
    params = parameters()[:2]
    optimizer = OPTIMIZERS["adamw"](params)
    set_gradients(params, 0)
    whole = probe_of(optimizer).measure(1.0, slow=True)
    places = {params[0]: Place(0, 1.0), params[1]: Place(1, 0.25)}
    shared = Probe(optimizer, places, 2, compile="never").measure(1.0, slow=True)
    assert torch.equal(shared.sums[0, :12], whole.sums[0, :12])
    assert torch.equal(shared.sums[1, :12], whole.sums[1, :12] * 0.25)
    assert whole.sketch is not None and shared.sketch is not None
    assert torch.equal(shared.sketch[1], whole.sketch[1] * 0.25)
    assert whole.sketch.sum(1).tolist() == [185, 11]


def test_signals_follow_from_the_sums_as_their_definitions_say() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    set_gradients(params, 3)
    past = torch.cat([optimizer.state[p]["exp_avg"].flatten().double() for p in params])
    grads = torch.cat([p.grad.flatten().double() for p in params if p.grad is not None])
    weights = torch.cat([p.detach().flatten().double() for p in params])
    found = {name: row[0] for name, row in signals(probe_of(optimizer)).items()}
    optimizer.step()
    m, v = (
        torch.cat([optimizer.state[p][name].flatten().double() for p in params])
        for name in ("exp_avg", "exp_avg_sq")
    )
    update = torch.cat([p.detach().flatten().double() for p in params]) - weights
    expected = {
        "grad_norm": grads.norm(),
        "update_norm": update.norm(),
        "param_norm": weights.norm(),
        "update_ratio_norm": update.norm() / weights.norm(),
        "exp_avg_norm": m.norm(),
        "exp_avg_sq_norm": v.norm(),
        "grad_momentum_cosine": (grads @ past) / (grads.norm() * past.norm()),
        "gradient_snr": m.norm() / v.sum().sqrt(),
        "below_eps_fraction": 0.0,
        "nonfinite_count": 0.0,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-4, abs=1e-12), name
    assert math.isnan(found["applied_update_norm"]) or found["applied_update_norm"] == 0.0


def test_gradients_and_second_moments_below_eps_are_counted() -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, eps=1e-3)
    parameter.grad = torch.full((10,), 1.0)
    parameter.grad[:3] = 1e-4  # the gradient itself
    parameter.grad[3:5] = 2e-3  # only sqrt(v): 2e-3 * sqrt(0.001)
    assert sums_of(probe_of(optimizer))["below_eps"] == 5


def test_the_sketch_is_the_histogram_of_m_over_root_v() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    set_gradients(params, 3)
    for p in params:  # never any gradient: in no bin
        p.grad.flatten()[0] = 0.0
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][name].flatten()[0] = 0.0
    sketch = probe_of(optimizer).measure(1.0, slow=True).sketch
    assert sketch is not None
    optimizer.step()
    for row in (0, 1):
        ratios = [
            (optimizer.state[p]["exp_avg"] / optimizer.state[p]["exp_avg_sq"].sqrt()).flatten()
            for p in params[row::2]
        ]
        kept = torch.cat(ratios).nan_to_num(nan=99.0)
        kept = kept[kept != 99.0].clamp(LOW, HIGH - 1e-6)
        expected, _ = np.histogram(kept.numpy(), BINS, (LOW, HIGH))
        assert np.abs(sketch[row].numpy() - expected).sum() <= 2  # rounding at an edge
        assert sketch[row].sum() == len(kept)


def test_a_neuron_is_dead_after_looks_without_a_gradient_and_alive_at_once() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    probe = probe_of(optimizer)
    fractions = []
    for look in range(DEAD_AFTER_LOOKS + 2):
        set_gradients(params, look)
        assert params[0].grad is not None
        if look <= DEAD_AFTER_LOOKS:
            params[0].grad[:9] = 0.0
        fractions.append(signals(probe)["dead_fraction"][0])
    assert fractions[DEAD_AFTER_LOOKS - 2 :] == [0.0, 9 / 37, 9 / 37, 0.0]
    assert math.isnan(signals(probe)["dead_fraction"][2])  # no neurons in the other group


def test_parameter_norms_are_kept_until_the_next_look_or_a_rollback() -> None:
    params = parameters()
    optimizer = OPTIMIZERS["sgd"](params)
    probe = probe_of(optimizer)
    set_gradients(params, 0)
    first = signals(probe, slow=False)["param_norm"]
    with torch.no_grad():
        params[0].mul_(3.0)
    assert signals(probe, slow=False)["param_norm"] == first
    probe.forget()
    grown = signals(probe, slow=False)["param_norm"]
    assert grown[1] == pytest.approx(
        math.sqrt(sum(float(p.detach().double().square().sum()) for p in params[::2])), rel=1e-6
    )
    assert grown[1] > first[1]


def test_of_another_optimizer_what_was_applied_is_measured(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = [torch.nn.Parameter(torch.randn(20, 30)) for _ in range(2)]
    optimizer = torch.optim.Muon(matrices, lr=0.1)
    probe = probe_of(optimizer)
    assert "the pending update of Muon cannot be worked out" in caplog.text
    assert "update_norm" not in probe.signals and "applied_update_norm" in probe.signals
    assert not probe.sketches
    set_gradients(matrices, 0)
    probe.measure(1.0)
    before = [p.detach().clone() for p in matrices]
    optimizer.step()
    probe.after_step()
    moved = [float((p.detach() - b).norm()) for p, b in zip(matrices, before, strict=True)]
    assert signals(probe)["applied_update_norm"][1:] == pytest.approx(moved, rel=1e-6)


def test_a_sample_of_a_large_model_tells_what_was_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.agent.probe.applied.SAMPLED_ELEMENTS", 1000)
    parameter = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.Adafactor([parameter], lr=1e-2)
    probe = probe_of(optimizer)
    set_gradients([parameter], 0)
    probe.measure(1.0)
    optimizer.step()
    probe.after_step()
    moved = float(parameter.detach().norm())
    set_gradients([parameter], 1)
    assert signals(probe)["applied_update_norm"][0] == pytest.approx(moved, rel=0.1)


class Halved(torch.optim.AdamW):
    """Derives from AdamW and steps in a way of its own."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)


class Renamed(torch.optim.AdamW):
    """Derives from AdamW and steps as it does."""


def test_a_class_that_steps_in_its_own_way_is_not_taken_for_what_it_derives_from() -> None:
    params = parameters()
    assert probe_of(Halved(params)).adapter is None
    assert probe_of(Renamed(params)).adapter is not None


def test_a_sparse_gradient_is_refused_by_name() -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="sparse"):
        probe_of(torch.optim.SGD(embedding.parameters())).measure(1.0)


@compiles
@pytest.mark.parametrize("slow", [False, True])
def test_the_compiled_pass_measures_the_same(
    slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adding, "BIG", 5000)
    monkeypatch.setattr(adding, "SKETCHED_AT_ONCE", 1 << 13)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (30_000, 8192, 700, 20)]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    set_gradients(params, 2)
    assert params[0].grad is not None
    params[0].grad[5] = 0.0
    eager, compiled = (probe_of(optimizer, c).measure(1.0, slow=slow) for c in ("never", "always"))
    assert "uncompiled" not in caplog.text
    assert torch.allclose(eager.sums, compiled.sums, rtol=1e-6, atol=1e-12)
    assert (eager.sketch is None) == (compiled.sketch is None) == (not slow)
    if eager.sketch is not None and compiled.sketch is not None:
        assert (eager.sketch - compiled.sketch).abs().sum() <= 20  # rounding at an edge
        assert torch.equal(eager.sketch.sum(1), compiled.sketch.sum(1))


@compiles
def test_of_a_large_tensor_every_fourth_row_is_sketched_and_counts_for_four() -> None:
    size = (1 << 19) + 3 * 4096 + 100  # no multiple of four rows
    parameter = torch.nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2)
    for step in range(3):
        set_gradients([parameter], step)
        optimizer.step()
    set_gradients([parameter], 3)
    whole, sampled = (
        probe_of(optimizer, c).measure(1.0, slow=True).sketch for c in ("never", "always")
    )
    assert whole is not None and sampled is not None
    assert sampled.sum() == pytest.approx(size)
    assert ((whole - sampled).abs().max() / size) < 0.002
    assert not torch.equal(whole, sampled)


def test_without_a_compiler_the_pass_runs_uncompiled_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(adding, "compiled_pass", broken)
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    set_gradients(params, 0)
    found = sums_of(probe_of(optimizer, "always"))
    assert found == pytest.approx(sums_of(probe_of(optimizer, "never")), rel=1e-6)
    assert caplog.text.count("runs uncompiled (slower): no compiler here") == 1
