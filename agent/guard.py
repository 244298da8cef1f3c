"""The guard: watches every `optimizer.step()` of a training loop and acts before it is applied.

The only place that calls the other modules of the agent, in the order of the way of a step: probe,
reduce, judge, consensus, actuate; between two steps: directives, restore points.  Nothing here
raises into the training loop, and every rank takes part in every collective, whatever fails.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.agent.actions.scale_lr import LrFactor
from trimtab.agent.actions.skip_batch import Veto
from trimtab.agent.channel import Channel, JobDescription
from trimtab.agent.config import GuardConfig
from trimtab.agent.data import DataPosition, Loader
from trimtab.agent.probe import SUMS, probe_for
from trimtab.agent.ranks import Ranks
from trimtab.agent.restore import RestoreRing
from trimtab.controller.engine.model import (
    DECLARED,
    NO_TABLE,
    Ack,
    Action,
    ArmedTable,
    Change,
    Directive,
    Layout,
    Observation,
    Outcome,
    Verdict,
    VerdictKind,
)
from trimtab.controller.engine.verdict import judge
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import wire

log = logging.getLogger(__name__)

STOPPED_KEPT = 1000
"""Vetoes and clips remembered against the budgets of tables that do not know of them yet."""

DECLARED_KEPT = 64
"""Declared changes remembered for tables that do not know of them yet."""

_EXPIRED = "the armed table has expired: only the reflex guards (non-finite values)"


class Guard:
    """Guards one optimizer.  To be made on every rank, after the process group.

    ```python
    guard = Guard(model, optimizer, scheduler=scheduler, loader=batch_of_index)
    for step, batch in guard.steps(total_steps):
        loss = model(batch)
        loss.backward()
        guard.observe(loss)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        loader: Loader | None = None,
        config: GuardConfig | None = None,
    ) -> None:
        """Hook into the optimizer.

        Args:
            model: What the optimizer trains; its state is part of a restore point.
            optimizer: Any torch optimizer; exact for Adam and AdamW, gradients only for others.
            scheduler: LR scheduler, rolled back with the rest.
            loader: A function from batch index to batch or a sequence of batches, so that a
                rollback can move the data position; any other iterable cannot be moved.
            config: Settings; by default from the TRIMTAB_* variables.
        """
        self.config = config or GuardConfig()
        self.observation: Observation | None = None
        """Job-wide numbers of the last step and what was done with it; the same on every rank."""
        self.failures = 0
        """Steps on which something of trimtab's failed; training went on without it."""

        self._optimizer = optimizer
        self._probe = probe_for(optimizer)
        self._ranks = Ranks()
        self._position = DataPosition(loader)
        self._veto = Veto(optimizer)
        self._lr_factor = LrFactor(optimizer)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        self._ring = RestoreRing(
            {name: part for name, part in parts.items() if part is not None},
            self.config.restore_budget_bytes,
        )
        self._step, self._seq = 0, 0
        self._stepped, self._in_turn = True, False
        self._scale = 1.0
        self._loss_sum: Tensor | float = 0.0
        self._losses = 0
        self._stopped: deque[tuple[int, str]] = deque(maxlen=STOPPED_KEPT)
        self._declared: list[tuple[int, Change]] = []
        self._directive: Directive | None = None
        self._answered: dict[str, Ack] = {}
        self._said: set[str] = set()
        self._channel = self._open_channel()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def steps(self, stop: int, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) until `stop` optimizer steps are done.

        Carries out directives and takes restore points between two steps; after a rollback the step
        number goes back.  A turn without an `optimizer.step()` (gradient accumulation) keeps its
        step number.

        Args:
            stop: Number of the step that is no longer taken.
            start: Number of the first step, for a job that resumes; batches count from it too.
        """
        self._step = self._position.index = start
        self._stepped = True
        while True:
            if self._stepped:
                self._guarded("between two steps", self._between_steps)
                self._stepped = False
            if self._step >= stop:
                break
            try:
                batch = self._position.take()
            except (StopIteration, IndexError):
                break
            yield self._step, batch
        self.close()

    def observe(self, loss: Tensor | float) -> None:
        """Tell the loss of this rank's batch; of several before a step, the mean counts."""
        self._loss_sum = self._loss_sum + (loss.detach() if isinstance(loss, Tensor) else loss)
        self._losses += 1

    def declare(self, change: str) -> None:
        """Say that the next step differs by intention, so that it is not taken for a spike.

        To be called on every rank, or at least on the leader, before the step.

        Args:
            change: "lr_schedule" (such as a warm restart), "batch_size" or "data_mix".
        """
        if change not in DECLARED:
            self._say(f"declare({change!r}) is none of {', '.join(DECLARED)}; nothing is declared")
            return
        self._declared = [*self._declared[1 - DECLARED_KEPT :], (self._seq, Change(change))]

    def close(self) -> None:
        """Take the hooks off and hang up.  Safe to call again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._channel is not None:
            self._channel.close()

    def _open_channel(self) -> Channel | None:
        if not self._ranks.leading:
            return None
        if self.config.address is None:
            log.warning(
                "trimtab: no controller (TRIMTAB_ADDRESS is not set): only the reflex guards"
                " (non-finite values)"
            )
            return None
        job = JobDescription(
            run=self.config.run,
            world_size=self._ranks.size,
            layout=Layout(signals=self._probe.signals),
            optimizer=type(self._optimizer).__name__,
        )
        return Channel(self.config.address, job)

    def _before_step(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Step pre-hook: measure, judge, agree, act on the pending update."""
        self._put_back()  # of a step that raised before its post-hook
        if len(args) > 1 or kwargs.get("closure") is not None:
            self._say(
                "optimizer.step(closure) computes gradients too late to be judged; not guarded"
            )
            return
        if getattr(self._optimizer, "grad_scale", None) is not None:
            self._say(
                "a GradScaler leaves unscaling to a fused optimizer, whose gradients cannot be read"
                " here yet; not guarded (call scaler.unscale_(optimizer) before, or fused=False)"
            )
            return
        if self._directive is not None:  # a loop of the user's own: no turn of steps() came
            self._guarded("between two steps", self._carry_out)
        factor = self._lr_factor.at(self._step)
        vector = self._measure(factor)
        try:
            # Collectives: joined by every rank whatever failed on it, or the others would wait.
            sums = self._ranks.total(vector).tolist()
            payload, table_seq = self._ranks.share(*self._propose(sums, factor))
        except Exception as error:  # noqa: BLE001  a peer is gone; the job will notice too
            self._failed("a collective", error)
            self.close()
            return
        self._guarded("judging a step", lambda: self._act(sums, factor, payload, table_seq))
        self._lr_factor.apply(factor * self._scale)

    def _measure(self, factor: float) -> Tensor:
        """Return this rank's share of the job's sums; a failed one says so in its last place."""
        vector = torch.zeros(len(SUMS) + 4, dtype=torch.float64)
        try:
            # Replicas hold the same numbers: each counts for its share.
            vector[: len(SUMS)] = self._probe.measure(factor) / self._ranks.size
            if self._losses:
                vector[-4], vector[-3] = float(self._loss_sum) / self._losses, 1.0
            vector[-2] = float(
                any(p.grad is not None for g in self._optimizer.param_groups for p in g["params"])
            )
        except Exception as error:  # noqa: BLE001  must not reach the training loop
            self._failed("measuring a step", error)
            vector.zero_()
            vector[-1] = 1.0
        self._loss_sum, self._losses = 0.0, 0
        return vector

    def _propose(self, sums: list[float], factor: float) -> tuple[bytes, int]:
        """Return what the leader announces of this step, and the table it judged by."""
        payload, verdict = b"", Verdict()
        if not self._ranks.leading:
            return payload, NO_TABLE
        try:
            values = self._values(sums, factor)
            verdict = self._verdict(values, factor) if values else verdict
            payload = self._announcement(verdict)
        except Exception as error:  # noqa: BLE001  nor may the other ranks wait for it
            self._failed("judging a step", error)
        return payload, verdict.table_seq

    def _act(self, sums: list[float], factor: float, payload: bytes, table_seq: int) -> None:
        """Do what the leader announced and write down what was seen.  On every rank."""
        verdict = self._heard(payload, table_seq)
        if verdict.kind is VerdictKind.VETO:
            self._veto.arm()
        elif verdict.kind is VerdictKind.SCALE:
            self._scale = verdict.scale
        values = self._values(sums, factor)
        if not values:
            return
        self.observation = Observation(
            seq=self._seq,
            step=self._step,
            values=values,
            verdict=verdict,
            lr_factor=factor,
            declared=tuple(change for seq, change in self._declared if seq == self._seq),
            batch=self._position.index - 1 if self._position.index else None,
        )
        if self._channel is not None:
            self._channel.send(self.observation)

    def _values(self, sums: list[float], factor: float) -> dict[str, float]:
        """Return signal to value from the job-wide sums; nothing if they are no whole step."""
        loss_sum, losses, with_gradients, failed = sums[len(SUMS) :]
        if failed:
            return {}
        if not with_gradients:
            self._say("no parameter has a gradient: there is no update to judge")
            return {}
        grad_sq, update_sq, exp_avg_sq, exp_avg_sq_sq, nonfinite = sums[: len(SUMS)]
        measured = {
            "grad_norm": math.sqrt(grad_sq),
            "update_norm": math.sqrt(update_sq),
            "exp_avg_norm": math.sqrt(exp_avg_sq),
            "exp_avg_sq_norm": math.sqrt(exp_avg_sq_sq),
            "nonfinite_count": float(round(nonfinite)),
            "lr": float(self._optimizer.param_groups[0]["lr"]) * factor,
        }
        if losses:
            measured["loss"] = loss_sum / losses
        return {name: measured[name] for name in self._probe.signals if name in measured}

    def _verdict(self, values: dict[str, float], factor: float) -> Verdict:
        """Judge the step by the newest table.  On the leader."""
        table = self._table()
        since = table.seq if table is not None else self._seq
        verdict = judge(
            table,
            values,
            {},
            seq=self._seq,
            lr_factor=factor,
            spent=Counter(rule for seq, rule in self._stopped if seq > since),
            declared={change for seq, change in self._declared if seq > since},
        )
        if verdict.kind is not VerdictKind.APPLY:
            self._stopped.append((self._seq, verdict.rule))
        return verdict

    def _table(self) -> ArmedTable | None:
        table = self._channel.table if self._channel is not None else None
        if table is not None and self._seq > table.expires_seq:
            self._say(_EXPIRED)
        elif table is not None:
            self._said.discard(_EXPIRED)
        return table

    def _announcement(self, verdict: Verdict) -> bytes:
        """Return what all ranks must hear of this step: a veto, a directive, or nothing."""
        directive = self._next_directive()
        if verdict.kind is VerdictKind.APPLY and directive is None:
            return b""
        message = pb.Announcement(verdict=wire.pb_from_verdict(verdict))
        if directive is not None:
            message.directive.CopyFrom(wire.pb_from_directive(directive))
        return bytes(message.SerializeToString())

    def _heard(self, payload: bytes, table_seq: int) -> Verdict:
        if not payload:
            return Verdict(table_seq=table_seq)
        message = pb.Announcement.FromString(payload)
        if message.HasField("directive"):
            self._directive = wire.directive_from_pb(message.directive)
        return wire.verdict_from_pb(message.verdict)

    def _next_directive(self) -> Directive | None:
        """Return the next directive worth announcing; answer stale and repeated ones.  Leader."""
        while self._channel is not None and self._channel.directives:
            directive = self._channel.directives.popleft()
            if directive.id in self._answered:
                self._channel.send(self._answered[directive.id])
            elif self._seq > directive.expires_seq:
                self._answer(directive, Outcome.REFUSED, f"expired at seq {directive.expires_seq}")
            else:
                return directive
        return None

    def _after_step(self, *_: Any) -> None:
        """Step post-hook: put one-step changes back and count."""
        self._put_back()
        self._step += 1
        self._seq += 1
        self._stepped = True

    def _put_back(self) -> None:
        self._veto.disarm()
        self._lr_factor.undo()
        self._scale = 1.0

    def _between_steps(self) -> None:
        """Carry out a directive, then take a restore point if one is due.  On all ranks."""
        self._in_turn = True
        try:
            self._carry_out()
        finally:
            self._in_turn = False
        every = self.config.restore_every_steps
        due = every > 0 and self._step % every == 0 and self._position.movable
        if (
            due
            and self._ring.capacity > 0
            and not self._ring.save(self._step, self._position.index)
        ):
            self._say(
                f"a restore point takes {self._ring.size_bytes} bytes, more than"
                " TRIMTAB_RESTORE_BUDGET_BYTES: no rollback from memory"
            )

    def _carry_out(self) -> None:
        directive, self._directive = self._directive, None
        if directive is None:
            return
        if directive.action is Action.SCALE_LR:
            self._scale_lr(directive)
        elif directive.action is Action.ROLLBACK:
            self._roll_back(directive)
        else:
            self._answer(directive, Outcome.REFUSED, f"{directive.action} is no directive")

    def _scale_lr(self, directive: Directive) -> None:
        by, over = directive.arguments["by"], int(directive.arguments["over"])
        reason = self._lr_factor.refusal(by, self._step)
        if not self._ranks.agree(ready=not reason):
            self._answer(directive, Outcome.REFUSED, reason or "a rank refused")
            return
        self._lr_factor.add(by, self._step, over)
        self._answer(
            directive,
            Outcome.PENDING,
            f"LR factor {self._lr_factor.at(self._step):g} from step {self._step}",
        )

    def _roll_back(self, directive: Directive) -> None:
        """Return to the newest restore point that every rank has, or touch nothing."""
        steps = self._ring.steps_before(directive.arguments["before_step"])
        if not self._ranks.agree(ready=self._in_turn and self._position.movable):
            self._answer(
                directive,
                Outcome.REFUSED,
                "the data position cannot be moved: use guard.steps() with a loader by index",
            )
            return
        target = self._common(steps)
        if target is None:
            self._answer(directive, Outcome.REFUSED, "no restore point that old on every rank")
            return
        left = self._step
        point, error = None, ""
        try:
            point = self._ring.load(target)
        except Exception as reason:  # noqa: BLE001  the other ranks must hear of it
            error = repr(reason)
        if not self._ranks.agree(ready=point is not None) or point is None:
            self._answer(directive, Outcome.FAILED, error or "another rank could not load its part")
            return
        self._step = point.step
        self._position.index = point.index + int(directive.arguments["skip"])
        self._answer(
            directive,
            Outcome.PENDING,
            f"from step {left} to {self._step}, next batch {self._position.index}",
        )

    def _common(self, steps: list[int]) -> int | None:
        """Return the newest of the leader's restore points that every rank has."""
        offered, _ = self._ranks.share(",".join(map(str, steps)).encode(), 0)
        for step in (int(text) for text in offered.decode().split(",") if text):
            if self._ranks.agree(ready=step in steps):
                return step
        return None

    def _answer(self, directive: Directive, outcome: Outcome, detail: str) -> None:
        ack = Ack(
            id=directive.id,
            epoch=directive.epoch,
            seq=self._seq - 1,
            step=self._step,
            outcome=outcome,
            detail=detail,
        )
        self._answered[directive.id] = ack
        if self._channel is not None:
            log.warning(
                "trimtab: rule %s: %s %s (%s)",
                directive.rule,
                directive.action,
                "done" if outcome is Outcome.PENDING else outcome,
                detail,
            )
            self._channel.send(ack)

    def _guarded(self, doing: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  must not reach the training loop
            self._failed(doing, error)

    def _failed(self, doing: str, error: Exception) -> None:
        self.failures += 1
        self._say(f"{doing} failed, training goes on unguarded there: {error!r}")

    def _say(self, message: str) -> None:
        """Log a message the first time it comes."""
        if message not in self._said:
            self._said.add(message)
            log.warning("trimtab: %s", message)
