"""What the loop tells becomes signals, and what the agent costs is known."""

import math
from dataclasses import replace

import pytest
import torch
from jobs import ALONE, batch_of, loss_of, small_run

from trimtab.agent import Guard
from trimtab.agent.clock import SETTLED_STEPS, Clock


def guarded(**told: object) -> tuple[torch.nn.Module, torch.optim.Optimizer, Guard]:
    model, optimizer, _, guard = small_run()
    guard.close()
    return model, optimizer, Guard(model, optimizer, loader=batch_of, config=ALONE, **told)  # type: ignore[arg-type]


def test_what_the_loop_tells_becomes_signals() -> None:
    model, optimizer, guard = guarded(datasets=["web", "code"], signals=["router_entropy"])
    for step, batch in guard.steps(2):
        loss = loss_of(model, batch)
        loss.backward()
        if step == 0:
            guard.observe(1.0, dataset="web", tokens=100, grad_norm=torch.tensor(5.0))
            guard.observe(3.0, dataset="web", tokens=torch.tensor(28))
            guard.observe(8.0, dataset="code", signals={"router_entropy": torch.tensor(0.25)})
        optimizer.step()
        assert guard.observation is not None
        values = guard.observation.values
        if step == 0:
            assert values["loss"] == 4.0
            assert values["dataset_loss[web]"] == 2.0
            assert values["dataset_loss[code]"] == 8.0
            assert values["tokens"] == 128.0
            assert values["unclipped_grad_norm"] == 5.0
            assert values["router_entropy"] == 0.25
        else:  # a step that tells nothing has no old numbers
            assert not set(values) & {"loss", "dataset_loss[web]", "tokens", "router_entropy"}


def test_only_a_loss_that_is_nan_is_a_nan_of_the_step() -> None:
    model, optimizer, guard = guarded(signals=["mine"])
    kinds = []
    for step, batch in guard.steps(3):
        loss_of(model, batch).backward()
        guard.observe(
            math.nan if step == 1 else 1.0, signals={"mine": math.nan}, grad_norm=math.inf
        )
        optimizer.step()
        assert guard.observation is not None
        kinds.append(guard.observation.verdict.kind.value)
        assert "mine" not in guard.observation.values
        assert "unclipped_grad_norm" not in guard.observation.values
    assert kinds == ["apply", "veto", "apply"]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"dataset": "books"}, "dataset_loss[books], which the Guard was not given"),
        ({"signals": {"theirs": 1.0}}, "theirs, which the Guard was not given"),
        ({"batch_ids": 7}, "observing a step failed"),
        ({"grad_norm": "large"}, "observing a step failed"),
    ],
)
def test_what_cannot_be_told_is_said_once_and_left_out(
    told: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, guard = guarded()
    for _, batch in guard.steps(3):
        loss = loss_of(model, batch)
        loss.backward()
        guard.observe(loss, **told)  # type: ignore[arg-type]
        optimizer.step()
        assert guard.observation is not None
        assert guard.observation.values["loss"] == pytest.approx(loss.item())
    assert caplog.text.count(message) == 1


def test_every_signal_that_the_layout_names_is_measured_sooner_or_later() -> None:
    model, optimizer, guard = guarded(datasets=["web"])
    seen: set[str] = set()
    layers: set[str] = set()
    for _, batch in guard.steps(12):
        loss = loss_of(model, batch)
        loss.backward()
        guard.observe(loss, dataset="web", tokens=8, grad_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert guard.observation is not None
        seen |= set(guard.observation.values)
        layers |= {n for n, v in guard.observation.vectors.items() if not all(map(math.isnan, v))}
        if guard.observation.ratio_sketch:
            seen |= {"ratio_dip", "ratio_dip_pvalue"}
            layers |= {"ratio_dip", "ratio_dip_pvalue"}
    assert set(guard.layout.signals) - seen == {"loss_scale"}  # there is no scaler
    assert set(guard.layout.layer_signals) - layers == set()
    assert seen <= set(guard.layout.signals)


def steps_of(clock: Clock, own_s: float, sketched_own_s: float, steps: int, every: int) -> None:
    """Let a step take 1 s, and the agent's part of it what is given."""
    for step in range(steps):
        sketched = step % every == 0
        clock._done_at = None if clock._done_at is None else 0.0
        clock._own_s = sketched_own_s if sketched else own_s
        clock.step_done(sketched=sketched, every=every)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.agent.clock.time.perf_counter", lambda: 1.0)


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(
    ("own", "sketched", "budget", "over"),
    [
        (0.005, 0.010, 0.02, False),
        (0.005, 0.300, 0.02, True),  # 0.5 % and 3 % more
        (0.100, 0.101, 0.02, False),  # over the budget, but not by the sketch
    ],
)
def test_sketching_more_rarely_is_called_for_where_it_helps(
    own: float, sketched: float, budget: float, over: bool
) -> None:
    clock = Clock(budget)
    steps_of(clock, own, sketched, 5 * SETTLED_STEPS, every=10)
    assert clock.over_budget() == over
    assert clock.overhead == pytest.approx(own + (sketched - own) / 10, rel=0.05)
    assert not clock.over_budget()  # at most once in a while


def test_an_agent_over_its_budget_sketches_more_rarely_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, guard = guarded()
    monkeypatch.setattr(guard._clock, "over_budget", lambda: guard._step == 20)
    sketched = []
    for step, batch in guard.steps(60):
        loss_of(model, batch).backward()
        optimizer.step()
        assert guard.observation is not None
        if guard.observation.ratio_sketch:
            sketched.append(step)
    assert sketched == [0, 10, 20, 40]
    assert guard.observation is not None
    assert guard.observation.values["sketch_every_steps"] == 20.0
    assert "only every 20 steps from now on" in caplog.text


def test_activations_are_those_of_the_modules_in_sketched_steps_alone() -> None:
    model, optimizer, _, plain = small_run()
    plain.close()
    settings = replace(ALONE, activations=True, sketch_every_steps=3)
    guard = Guard(model, optimizer, loader=batch_of, config=settings)
    assert {"activation_mean", "activation_max"} <= set(guard.layout.layer_signals)
    for step, batch in guard.steps(7):
        outputs = []
        x = batch
        for layer in model:  # type: ignore[attr-defined]
            x = layer(x)
            outputs.append(x.detach().abs())
        (x.squeeze(1) - batch.sum(1)).square().mean().backward()
        with torch.no_grad():
            model.eval()(100 * batch)  # an evaluation in between is no training step
            model.train()
        optimizer.step()
        optimizer.zero_grad()
        assert guard.observation is not None
        vectors = guard.observation.vectors
        assert ("activation_max" in vectors) == (step % 3 == 0)
        if step % 3 == 0:
            assert guard.layout.layer_groups == ("0", "2")
            first, last = outputs[0], outputs[2]
            assert vectors["activation_max"] == (float(first.max()), float(last.max()))
            assert vectors["activation_mean"] == pytest.approx(
                (float(first.mean()), float(last.mean()))
            )
            assert guard.observation.values["activation_max"] == float(max(first.max(), last.max()))
    assert not any(module._forward_hooks for module in model.modules())  # gone with the guard
