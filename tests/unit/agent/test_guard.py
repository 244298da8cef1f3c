"""One process, one guard: what it does to a training loop, and what it never does."""

import math

import jobs
import pytest
import torch
from jobs import (
    ALONE,
    BAD_BATCH,
    batch_of,
    loss_of,
    rollback,
    small_run,
    snapshot_of,
    with_controller,
)

from trimtab.agent import Guard, GuardConfig
from trimtab.controller.engine.model import Outcome, VerdictKind


def train(
    run: tuple[torch.nn.Module, torch.optim.Optimizer, object, Guard], steps: int
) -> list[float]:
    model, optimizer, scheduler, guard = run
    losses = []
    for _, batch in guard.steps(steps):
        loss = loss_of(model, batch)
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        scheduler.step()  # type: ignore[attr-defined]
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_guard_that_sees_nothing_wrong_changes_nothing() -> None:
    guarded, plain = small_run(), small_run()
    plain[3].close()
    losses = train(guarded, 60)
    model, optimizer, scheduler, _ = plain
    for index in range(60):
        loss = loss_of(model, batch_of(index))
        loss.backward()
        assert loss.item() == losses[index]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert snapshot_of(*guarded[:2]) == snapshot_of(*plain[:2])


def test_the_observation_has_the_pending_update_before_it_is_applied() -> None:
    model, optimizer, _, guard = run = small_run()
    del run
    seen = []

    def before(*_: object) -> None:
        assert guard.observation is not None
        seen.append((guard.observation.step, [p.detach().clone() for p in model.parameters()]))

    optimizer.register_step_pre_hook(before)  # runs after the guard's own
    for step, batch in guard.steps(3):
        loss = loss_of(model, batch)
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        at, parameters = seen[-1]
        assert guard.observation is not None
        moved = sum(
            (p.detach() - b).double().square().sum()
            for p, b in zip(model.parameters(), parameters, strict=True)
        )
        assert at == step
        assert guard.observation.values["loss"] == pytest.approx(loss.item())
        assert guard.observation.values["update_norm"] == pytest.approx(
            math.sqrt(float(moved)),
            rel=2e-3,  # weight decay is in the one and not in the other
        )


def test_a_bad_batch_is_vetoed_and_the_run_is_as_if_it_had_been_left_out() -> None:
    bad = 40
    guarded = small_run(loader=lambda index: batch_of(index, scale=20.0 if index == bad else 1.0))
    spared = small_run(loader=lambda index: batch_of(index if index < bad else index + 1))
    for run in (guarded, spared):
        run[2].step_size = 10**9  # the LR schedule moves on over a skipped batch
    controller = with_controller(guarded[3], BAD_BATCH)
    train(guarded, 80)
    train(spared, 79)
    vetoed = [o.step for o in controller.observations if o.verdict.kind is VerdictKind.VETO]
    assert vetoed == [bad]
    assert snapshot_of(*guarded[:2]) == snapshot_of(*spared[:2])
    assert controller.state.counts["verdict_mismatch",] == 0
    assert controller.state.counts["outcome", "bad-batch", "skip_batch", "recovered"] == 1


LR_JUMP = """
version: 1
defaults: {after: 0}
rules:
  - name: lr-jump
    when: lr > 3 * median(lr, 16)
    do:
      - skip_batch
      - scale_lr:
          by: median(lr, 16) / lr
          over: 10 steps
"""


@pytest.mark.parametrize("own_loop", [False, True])
def test_an_lr_jump_is_undone_until_the_factor_ends(own_loop: bool) -> None:
    model, optimizer, _, guard = small_run()
    controller = with_controller(guard, LR_JUMP)
    applied = []
    optimizer.register_step_pre_hook(lambda o, *_: applied.append(o.param_groups[0]["lr"]))
    turns = ((i, batch_of(i)) for i in range(60)) if own_loop else guard.steps(60)
    for step, batch in turns:
        if step == 30:
            optimizer.param_groups[0]["lr"] *= 10
        loss = loss_of(model, batch)
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 if step >= 30 else 0.01)
        optimizer.zero_grad()
    [ack] = controller.acks
    assert ack.outcome is Outcome.PENDING
    start = ack.step
    assert start in (31, 32)
    assert applied[start : start + 10] == pytest.approx([0.01] * 10)
    assert applied[start + 10] == pytest.approx(0.1)
    vetoes = [o.step for o in controller.observations if o.verdict.kind is VerdictKind.VETO]
    assert vetoes == list(range(30, start))


def test_a_rollback_replays_bit_for_bit_and_skips_what_it_is_told() -> None:
    run = model, optimizer, scheduler, guard = small_run(loader=lambda index: index)
    controller = with_controller(guard, BAD_BATCH)
    trail = []
    for step, index in guard.steps(50):
        if len(trail) == 25:
            controller.directives.append(rollback(24, skip=0))
        if len(trail) == 40:
            controller.directives.append(rollback(30, skip=7, seq=1))
        loss = loss_of(model, batch_of(index))
        loss.backward()
        guard.observe(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        trail.append((step, index, loss.item()))
    del run
    back = [i for i in range(1, len(trail)) if trail[i][0] <= trail[i - 1][0]]
    assert [trail[i][:2] for i in back] == [(20, 20), (30, 37)]
    assert trail[back[0] : back[0] + 5] == trail[20:25]
    assert [ack.outcome for ack in controller.acks] == [Outcome.PENDING, Outcome.PENDING]


def test_a_rollback_without_a_movable_loader_is_refused_and_says_how() -> None:
    model, optimizer, _, guard = small_run(loader=iter([batch_of(i) for i in range(20)]))
    controller = with_controller(guard, BAD_BATCH)
    for step, batch in guard.steps(100):
        if step == 12:
            controller.directives.append(rollback(11, skip=0))
        loss_of(model, batch).backward()
        optimizer.step()
    [ack] = controller.acks
    assert (ack.outcome, ack.detail) == (
        Outcome.REFUSED,
        "the data position cannot be moved: use guard.steps() with a loader by index",
    )
    assert step == 19  # the data ended, so did the loop


def test_a_directive_is_carried_out_once_and_not_after_it_expired() -> None:
    model, optimizer, _, guard = small_run()
    controller = with_controller(guard, BAD_BATCH)
    first = rollback(10, skip=0)
    stale = rollback(9, skip=0, seq=1)
    object.__setattr__(stale, "expires_seq", 3)
    for step, batch in guard.steps(16):
        if step == 12 and not controller.acks:
            controller.directives.extend([first, first, stale])
        loss_of(model, batch).backward()
        optimizer.step()
    assert [(a.id, a.outcome) for a in controller.acks] == [
        (first.id, Outcome.PENDING),
        (first.id, Outcome.PENDING),
        (stale.id, Outcome.REFUSED),
    ]
    assert guard.observation is not None
    assert guard.observation.seq == 16 + 2 + 1 - 1  # the two steps from 10 to 12, and 12 again


def test_a_turn_without_an_optimizer_step_keeps_the_step_number() -> None:
    model, optimizer, _, guard = small_run()
    steps = []
    for step, batch in guard.steps(3):
        loss_of(model, batch).backward()
        steps.append(step)
        if len(steps) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert steps == [0, 0, 1, 1, 2, 2]


def test_the_loss_of_a_step_is_the_mean_of_what_was_observed() -> None:
    model, optimizer, _, guard = small_run()
    for _, batch in guard.steps(2):
        loss_of(model, batch).backward()
        for loss in (torch.tensor(1.0), 2.0, torch.tensor(6.0)):
            guard.observe(loss)
        optimizer.step()
        assert guard.observation is not None
        assert guard.observation.values["loss"] == 3.0


def test_a_step_that_raises_leaves_the_lr_as_it_was() -> None:
    model, optimizer, _, guard = small_run()
    guard._lr_factor.add(0.5, step=0, over_steps=0)
    loss_of(model, batch_of(0)).backward()

    def fail(*_: object) -> None:
        raise RuntimeError("user's own")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="user's own"):
        optimizer.step()
    hook.remove()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_whatever_fails_in_the_guard_the_step_is_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run()
    for name in ("_heard", "_between_steps"):
        monkeypatch.setattr(run[3], name, lambda *_: 1 / 0)
    monkeypatch.setattr(run[3]._layout, "reading", lambda *_, **__: 1 / 0)
    losses = train(run, 20)
    assert losses[-1] < losses[0]
    assert run[3].failures >= 20
    assert caplog.text.count("failed, training goes on unguarded there") == 2  # once a reason


def test_a_model_without_gradients_is_said_once_and_let_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, optimizer, _, guard = small_run()
    for _ in guard.steps(3):
        optimizer.step()
    assert caplog.text.count("no parameter has a gradient") == 1
    assert guard.observation is None


def test_a_closure_is_not_guarded_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _, guard = small_run()

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(0))
        loss.backward()
        return loss.item()

    for _ in range(2):
        optimizer.step(closure)
    assert caplog.text.count("optimizer.step(closure)") == 1
    assert guard.observation is None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_gradients_are_read_without_the_scalers_factor(fused: bool, unscaled: bool) -> None:
    model, optimizer, _, guard = small_run(fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _, batch in guard.steps(3):
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        guard.observe(loss)
        scale = 1.0 if unscaled else 1024.0
        if unscaled:
            scaler.unscale_(optimizer)
        real = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())) / scale
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert guard.observation is not None
        assert guard.observation.values["grad_norm"] == pytest.approx(real, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_its_own(fused: bool) -> None:
    model, optimizer, _, _ = run = small_run(fused=fused)
    run[3].close()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    guard = Guard(model, optimizer, loader=batch_of, scaler=scaler, config=ALONE)
    seen = []
    for step, batch in guard.steps(6):
        overflow = len(seen) == 3
        loss = loss_of(model, batch)
        scaler.scale(loss * (math.inf if overflow else 1.0)).backward()
        guard.observe(loss)
        before = snapshot_of(model, optimizer)
        scaler.step(optimizer)
        assert (snapshot_of(model, optimizer) == before) == overflow
        scaler.update()
        optimizer.zero_grad()
        assert guard.observation is not None
        seen.append((step, guard.observation.seq, guard.observation.verdict.kind))
    assert [step for step, _, _ in seen] == [0, 1, 2, 3, 3, 4, 5]
    assert [seq for _, seq, _ in seen] == [0, 1, 2, 2, 3, 4, 5]
    assert {kind for _, _, kind in seen} == {VerdictKind.APPLY}
    # Torch does not even call an optimizer that is not fused.
    assert guard.scaler_skips == (1 if fused else 0)
    assert guard.observation is not None
    assert guard.observation.values["loss_scale"] == 512.0


def test_restore_points_over_the_budget_are_given_up_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = GuardConfig(address=None, run="t", restore_every_steps=2, restore_budget_bytes=100)
    run = small_run(config)
    train(run, 10)
    assert run[3]._ring.points == []
    assert "more than TRIMTAB_RESTORE_BUDGET_BYTES" in caplog.text


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_ADDRESS", "host:1")
    monkeypatch.setenv("TRIMTAB_RUN", "my-run")
    monkeypatch.setenv("TRIMTAB_RESTORE_EVERY_STEPS", "7")
    monkeypatch.setenv("TRIMTAB_RESTORE_BUDGET_BYTES", "many")
    config = GuardConfig()
    assert (config.address, config.run, config.restore_every_steps) == ("host:1", "my-run", 7)
    assert config.restore_budget_bytes == 1 << 30


def test_without_an_address_the_reflex_guards_and_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = small_run(
        ALONE, loader=lambda index: batch_of(index, scale=math.nan if index == 5 else 1)
    )
    losses = train(run, 10)
    assert math.isnan(losses[5]) and not any(math.isnan(x) for x in losses[6:])
    assert "only the reflex guards" in caplog.text
    assert jobs.ALONE.address is None


def test_when_a_peer_is_gone_the_loop_goes_on_unguarded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run()

    def gone(*_: object) -> None:
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(run[3]._ranks, "total", gone)
    assert len(train(run, 20)) == 20
    assert caplog.text.count("connection reset by peer") == 1
    assert run[3].observation is None


def test_a_guard_that_the_loop_closes_lets_it_go_on() -> None:
    model, optimizer, _, guard = small_run()
    steps = []
    for step, batch in guard.steps(6):
        steps.append(step)
        if step == 2:
            guard.close()
        loss_of(model, batch).backward()
        optimizer.step()
    assert steps == list(range(6))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_model_and_optimizer_are_guarded(fused: bool) -> None:
    model, optimizer, _, guard = small_run(
        fused=fused, loader=lambda at: batch_of(at, scale=math.nan if at == 5 else 1.0)
    )
    compiled = torch.compile(model, backend="eager")
    step_of = torch.compile(optimizer.step, backend="eager")
    vetoed, unchanged = [], []
    for step, batch in guard.steps(10):
        loss = loss_of(compiled, batch)
        loss.backward()
        guard.observe(loss)
        before = snapshot_of(model, optimizer)
        step_of()
        optimizer.zero_grad()
        assert guard.observation is not None
        assert guard.observation.step == step
        if guard.observation.verdict.kind is VerdictKind.VETO:
            vetoed.append(step)
        if snapshot_of(model, optimizer) == before:
            unchanged.append(step)
    assert vetoed == unchanged == [5]
    assert guard.failures == 0
