"""The guard: watches every `optimizer.step()` of a training loop and acts before it is applied.

The only place that calls the other modules of the agent, in the order of the way of a step: probe,
reduce, judge, consensus, actuate; between two steps: directives, restore points.  Nothing here
raises into the training loop, and every rank takes part in every collective, whatever fails.
"""

import functools
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

import trimtab
from trimtab.agent.actions.scale_lr import LrFactor
from trimtab.agent.actions.skip_batch import Veto
from trimtab.agent.activations import Activations
from trimtab.agent.channel import Channel, JobDescription
from trimtab.agent.clock import Clock
from trimtab.agent.config import GuardConfig
from trimtab.agent.data import DataPosition, Loader
from trimtab.agent.groups import GroupOf
from trimtab.agent.observing import Layout as VectorLayout
from trimtab.agent.observing import Reading, Told, with_activations
from trimtab.agent.probe.measure import Measured, Probe
from trimtab.agent.probe.sums import SUMS
from trimtab.agent.ranks import LEADER, Ranks
from trimtab.agent.registration import Registration, RegistrationError, register
from trimtab.agent.reporter import Reporter, Sample
from trimtab.agent.restore import RestoreRing, restore_rng
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
from trimtab.controller.engine.signals import of_dataset, with_datasets
from trimtab.controller.engine.verdict import judge
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import wire

if TYPE_CHECKING:
    from trimtab.agent.embedded import Embedded

log = logging.getLogger(__name__)

STOPPED_KEPT = 1000
"""Vetoes and clips remembered against the budgets of tables that do not know of them yet."""

DECLARED_KEPT = 64
"""Declared changes remembered for tables that do not know of them yet."""

MAX_SKETCH_EVERY = 1000
"""Steps between two sketches above which an agent over its budget does not go."""

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
        scaler: Any = None,
        groups: GroupOf | None = None,
        datasets: Sequence[str] = (),
        signals: Sequence[str] = (),
        config: GuardConfig | None = None,
    ) -> None:
        """Hook into the optimizer.

        Args:
            model: What the optimizer trains; its state is part of a restore point.
            optimizer: Any torch optimizer.  The pending update is exact for those listed in
                docs/agent.md; of others the applied one is measured, a step later.
            scheduler: LR scheduler, rolled back with the rest.
            loader: A function from batch index to batch, a sequence of batches, or a loader with
                `state_dict` (torchdata's StatefulDataLoader), so that a rollback can move the data
                position; any other iterable cannot be moved.
            scaler: GradScaler, for the signal loss_scale; rolled back with the rest.
            groups: From the name of a parameter to that of its layer group; by default by module
                structure, one group a block (`trimtab.agent.groups.group_of`).
            datasets: Names that `observe(dataset=...)` will be given, the same on every rank.
            signals: Names of the job's own signals in `observe(signals=...)`, likewise.
            config: Settings; by default from the TRIMTAB_* variables.
        """
        self.config = config or GuardConfig()
        self.observation: Observation | None = None
        """Job-wide numbers of the last step and what was done with it; the same on every rank."""
        self.failures = 0
        """Steps on which something of trimtab's failed; training went on without it."""
        self.scaler_skips = 0
        """Steps that a GradScaler threw away by itself; trimtab has no part in them."""
        self.refusal = ""
        """Why this job is not guarded at all; empty when it is."""

        self._optimizer, self._scaler = optimizer, scaler
        self._ranks = Ranks()
        self._told = Told(datasets, signals)
        self._position = DataPosition(loader)
        self._veto = Veto(optimizer)
        self._lr_factor = LrFactor(optimizer)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        self._ring = RestoreRing(
            {name: part for name, part in parts.items() if part is not None},
            self.config.restore_budget_bytes,
        )
        self._step, self._seq, self._scale = 0, 0, 1.0
        self._stepped, self._in_turn, self._thrown_away = True, False, False
        self._sketch_every = self._wanted_sketch_every = max(1, self.config.sketch_every_steps)
        self._clock = Clock(self.config.overhead_budget)
        self._stopped: deque[tuple[int, str]] = deque(maxlen=STOPPED_KEPT)
        self._declared: list[tuple[int, Change]] = []
        self._directive: Directive | None = None
        self._answered: dict[str, Ack] = {}
        self._said: set[str] = set()
        self._acts = self.config.mode == "act"
        if not self._acts:
            log.warning("trimtab: it only observes (TRIMTAB_MODE): nothing is done to this job")
        self._channel: Channel | Embedded | None = None
        self._reporter: Reporter | None = None
        self._activations: Activations | None = None
        self._batch_ids: tuple[str, ...] = ()
        self._dataset = ""
        self._loss: Tensor | float | None = None
        self._nonfinite: Tensor | float = 0.0
        # Not for a compiled optimizer.step to look into.
        self._hooks = [
            optimizer.register_step_pre_hook(_uncompiled(self._before_step)),
            optimizer.register_step_post_hook(_uncompiled(self._after_step)),
        ]
        self._guarding = False
        registration = self._register(model, groups)
        if registration is None:
            return
        self._groups = registration.groups
        self._probe = Probe(
            optimizer,
            registration.places,
            len(registration.groups),
            neurons=registration.neurons,
            compile=self.config.compile,
        )
        self._layout = VectorLayout(
            len(registration.groups),
            self._told.names,
            self._probe.signals,
            sketches=self._probe.sketches,
        )
        self._activations = self._watch(model)
        job = self._describe()
        self._channel = self._open_channel(job)
        self._reporter = self._open_reporter(job)
        self._guarding = True

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
            if not self._hooks:  # closed by the loop: a turn is all that can be counted
                self._step, self._stepped = self._step + 1, True
        self.close()

    def observe(
        self,
        loss: Tensor | float,
        *,
        dataset: str | None = None,
        batch_ids: Iterable[Any] = (),
        grad_norm: Tensor | float | None = None,
        tokens: Tensor | float | None = None,
        signals: Mapping[str, Tensor | float] | None = None,
    ) -> None:
        """Tell of this rank's batch; of several calls before a step, the means count.

        Tensors stay where they are: nothing waits for a device.

        Args:
            loss: Mean loss of the batch.
            dataset: Where the batch is from, one of the Guard's `datasets`.
            batch_ids: What the batch is made of, to find it again: `trimtab samples` shows them.
            grad_norm: Of the gradient before clipping, as `clip_grad_norm_` returns it.
            tokens: In the batch, on this rank; added up, not averaged.
            signals: The job's own, by the names that the Guard was given.
        """
        told: dict[str, Tensor | float] = {"loss": loss, **(signals or {})}
        if dataset is not None:
            told[of_dataset(dataset)] = loss
            self._dataset = dataset
        if grad_norm is not None:
            told["unclipped_grad_norm"] = grad_norm
        for name, value in told.items():
            if name in self._told.names:
                self._guarded("observing a step", functools.partial(self._told.add, name, value))
            else:
                known = ", ".join(self._told.names)
                self._say(f"observe() was told {name}, which the Guard was not given: {known}")
        if tokens is not None:
            self._guarded("observing a step", lambda: self._told.add_tokens(tokens))
        self._guarded("observing a step", lambda: self._note(batch_ids))

    def _note(self, batch_ids: Iterable[Any]) -> None:
        self._batch_ids += tuple(map(str, batch_ids))

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
        self._guarding = False
        self._hang_up()
        self._ranks.leave()

    def _hang_up(self) -> None:
        for opened in (self._channel, self._reporter, self._activations):
            if opened is not None:
                opened.close()

    def _register(self, model: nn.Module, groups: GroupOf | None) -> Registration | None:
        facts = {
            "trimtab": trimtab.__version__,
            "datasets and signals": ", ".join(self._told.names),
            "sketch_every_steps": str(self._sketch_every),
            "activations": str(self.config.activations),
        }
        try:
            return register(self._ranks, model, self._optimizer, facts, groups)
        except RegistrationError as error:
            self.refusal = str(error)
        log.error("trimtab: this job is NOT guarded: %s", self.refusal)
        return None

    def _watch(self, model: nn.Module) -> Activations | None:
        if not self.config.activations:
            return None
        found = Activations(model, self._groups, self._sketched)
        if not found.hooked:
            self._say("no layer group is named after a module: no activations are measured")
        return found

    def _describe(self) -> JobDescription:
        """Return what the job says of itself, the same on every rank."""
        job = JobDescription(
            run=self.config.run,
            world_size=self._ranks.size,
            layout=self.layout,
            optimizer=type(self._optimizer).__name__,
        )
        named = self._ranks.share_from(LEADER, json.dumps([job.run, job.session]).encode())
        run, session = json.loads(named)
        return replace(job, run=run, session=session)

    def _open_reporter(self, job: JobDescription) -> Reporter | None:
        if self.config.address is None or not self.config.rank_samples:
            return None
        return Reporter(self.config.address, job, self._ranks.rank)

    def _open_channel(self, job: JobDescription) -> "Channel | Embedded | None":
        if not self._ranks.leading:
            return None
        if self.config.address is not None:
            return Channel(self.config.address, job)
        if self.config.policy is not None:
            try:
                return embedded(self.config.policy, self.config.store, job)
            except Exception as error:  # noqa: BLE001  a bad policy must not stop a training
                log.error(  # noqa: TRY400
                    "trimtab: the policy is NOT in force, only the reflex guards (non-finite"
                    " values): %s",
                    error,
                )
                return None
        log.warning(
            "trimtab: no controller (TRIMTAB_ADDRESS is not set) and no policy (TRIMTAB_POLICY):"
            " only the reflex guards (non-finite values)"
        )
        return None

    @property
    def layout(self) -> Layout:
        """What the job measures, as its controller knows it."""
        layered = self._probe.signals
        layered += ("ratio_dip", "ratio_dip_pvalue") if self._probe.sketches else ()
        layered += ("activation_mean", "activation_max") if self._activations else ()
        return Layout(
            signals=(*self._told.names, "tokens", "lr", *layered),
            layer_groups=self._groups,
            layer_signals=layered,
        )

    def _sketched(self) -> bool:
        """Return whether the step at hand is one to measure what is costly."""
        return self._guarding and self._seq % self._sketch_every == 0

    def _before_step(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Step pre-hook: measure, judge, agree, act on the pending update."""
        if not self._guarding:
            return
        self._put_back()  # of a step that raised before its post-hook
        if len(args) > 1 or kwargs.get("closure") is not None:
            self._say(
                "optimizer.step(closure) computes gradients too late to be judged; not guarded"
            )
            return
        if self._directive is not None:  # a loop of the user's own: no turn of steps() came
            self._guarded("between two steps", self._carry_out)
        factor = self._lr_factor.at(self._step)
        sketched = self._sketched()
        with self._clock:
            vector, largest = self._measure(factor, sketched=sketched)
        try:
            # Collectives: joined by every rank whatever failed on it, or the others would wait.
            total = self._ranks.total(vector)
            if largest is not None:
                largest = -self._ranks.least(-largest)
            with self._clock:
                reading = self._read(total, largest, factor, sketched=sketched)
                proposal = self._propose(reading, factor)
            payload, table_seq = self._ranks.share(*proposal)
        except Exception as error:  # noqa: BLE001  a peer is gone; the job will notice too
            self._failed("a collective", error)
            self._guarding = False
            self._hang_up()
            return
        self._guarded("judging a step", lambda: self._act(reading, factor, payload, table_seq))
        self._lr_factor.apply(factor * self._scale)

    def _measure(self, factor: float, *, sketched: bool) -> tuple[Tensor, Tensor | None]:
        """Return this rank's share of the job's sums, or one that says that measuring failed.

        With it the largest activation of each layer group, in steps that measure them.
        """
        watching = sketched and self._activations is not None
        largest = torch.zeros(len(self._groups), dtype=torch.float64) if watching else None
        try:
            found_inf = getattr(self._optimizer, "found_inf", None)
            measured: Measured = self._probe.measure(factor, slow=sketched)
            if watching and self._activations is not None:
                activations, peaks = self._activations.taken(measured.sums.device)
                measured, largest = replace(measured, activations=activations), peaks.cpu()
            self._nonfinite = measured.sums[:, SUMS.index("nonfinite")].sum()
            if self._ranks.leading:
                self._tell_of_itself()
            vector = self._layout.vector(
                measured,
                self._told.vector(measured.sums.device),
                scaler_skips=found_inf is not None and float(found_inf) > 0.0,
            ).cpu()
        except Exception as error:  # noqa: BLE001  must not reach the training loop
            self._failed("measuring a step", error)
            vector = self._layout.failed(sketched=sketched, activations=watching)
        self._loss = self._told.own_loss
        self._told.clear()
        return vector, largest

    def _tell_of_itself(self) -> None:
        """Add what the leader alone knows of the job, and what trimtab costs it."""
        if self._scaler is not None:
            self._told.add("loss_scale", float(self._scaler.get_scale()))
        if self._clock.step_s is not None:
            self._told.add("step_time", self._clock.step_s)
            self._told.add("agent_overhead", self._clock.overhead)
            if self._clock.over_budget() and self._sketch_every < MAX_SKETCH_EVERY:
                self._wanted_sketch_every = 2 * self._sketch_every
                log.warning(
                    "trimtab: the agent takes %.2f %% of a step, TRIMTAB_OVERHEAD_BUDGET is %g %%:"
                    " sketches and parameter norms only every %d steps from now on",
                    100 * self._clock.overhead,
                    100 * self.config.overhead_budget,
                    self._wanted_sketch_every,
                )
        # Every rank goes by what all of them heard: their vectors must be of one length.
        self._told.add("sketch_every_steps", float(self._wanted_sketch_every))

    def _read(
        self, total: Tensor, largest: Tensor | None, factor: float, *, sketched: bool
    ) -> Reading | None:
        """Return the job-wide numbers of the step; None if they are no whole step."""
        reading = None
        try:
            reading = self._layout.reading(total, sketched=sketched)
            if reading.activations is not None and largest is not None:
                reading = with_activations(reading, reading.activations, largest)
        except Exception as error:  # noqa: BLE001  the other ranks wait in the next collective
            self._failed("judging a step", error)
        if reading is None or reading.failed:
            return None
        if reading.scaler_skips:
            self._thrown_away = True
            self.scaler_skips += 1
            self._say("the GradScaler skips steps by itself where gradients overflow; not guarded")
            return None
        if not reading.with_gradients:
            self._say("no parameter has a gradient: there is no update to judge")
            return None
        lr = float(self._optimizer.param_groups[0]["lr"]) * factor
        return replace(reading, values={**reading.values, "lr": lr})

    def _propose(self, reading: Reading | None, factor: float) -> tuple[bytes, int]:
        """Return what the leader announces of this step, and the table it judged by."""
        payload, verdict = b"", Verdict()
        if not self._ranks.leading:
            return payload, NO_TABLE
        try:
            verdict = self._verdict(reading, factor) if reading is not None else verdict
            payload = self._announcement(verdict)
        except Exception as error:  # noqa: BLE001  nor may the other ranks wait for it
            self._failed("judging a step", error)
        return payload, verdict.table_seq

    def _act(self, reading: Reading | None, factor: float, payload: bytes, table_seq: int) -> None:
        """Do what the leader announced and write down what was seen.  On every rank."""
        verdict = self._heard(payload, table_seq)
        if verdict.kind is VerdictKind.VETO:
            self._veto.arm()
        elif verdict.kind is VerdictKind.SCALE:
            self._scale = verdict.scale
        if reading is None:
            return
        self._sketch_every = int(reading.values["sketch_every_steps"])
        self.observation = Observation(
            seq=self._seq,
            step=self._step,
            values=reading.values,
            vectors=reading.vectors,
            verdict=verdict,
            lr_factor=factor,
            declared=tuple(change for seq, change in self._declared if seq == self._seq),
            batch=self._position.index - 1 if self._position.index else None,
            ratio_sketch=reading.ratio_sketch,
        )
        if self._channel is not None:
            self._channel.send(self.observation)

    def _verdict(self, reading: Reading, factor: float) -> Verdict:
        """Judge the step by the newest table.  On the leader."""
        if not self._acts:
            return Verdict()
        table = self._table()
        since = table.seq if table is not None else self._seq
        verdict = judge(
            table,
            reading.values,
            with_datasets(reading.values, reading.vectors, self._told.names),
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
        if self._guarding:
            self._guarded("measuring what was applied", self._probe.after_step)
        self._clock.step_done(sketched=self._sketched(), every=self._sketch_every)
        if self._thrown_away:  # the GradScaler took no step, so this was none
            self._thrown_away = False
            return
        if self._reporter is not None:
            self._guarded("reporting a step", self._report)
        self._batch_ids, self._dataset = (), ""
        self._step += 1
        self._seq += 1
        self._stepped = True

    def _report(self) -> None:
        assert self._reporter is not None  # noqa: S101  only called with one
        self._reporter.send(
            Sample(
                seq=self._seq,
                step=self._step,
                loss=self._loss,
                step_time_s=self._clock.step_s or 0.0,
                nonfinite=self._nonfinite,
                batch_ids=self._batch_ids,
                dataset=self._dataset,
            )
        )

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
            and not self._ring.save(self._step, self._position.now())
        ):
            self._say(
                f"a restore point takes {self._ring.size_bytes} bytes, more than"
                " TRIMTAB_RESTORE_BUDGET_BYTES: no rollback from memory"
            )

    def _carry_out(self) -> None:
        directive, self._directive = self._directive, None
        if directive is None:
            return
        if not self._acts:
            self._answer(directive, Outcome.REFUSED, "the agent only observes (TRIMTAB_MODE)")
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
            self._position.move(point.position, int(directive.arguments["skip"]))
        except Exception as reason:  # noqa: BLE001  the other ranks must hear of it
            error = repr(reason)
        if not self._ranks.agree(ready=point is not None) or point is None:
            self._answer(directive, Outcome.FAILED, error or "another rank could not load its part")
            return
        self._probe.forget()
        self._step = point.step
        restore_rng(point)
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


_Hook = TypeVar("_Hook", bound=Callable[..., None])


def _uncompiled(hook: _Hook) -> _Hook:
    hidden: _Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return hidden


def embedded(policy: str, store: str | None, job: JobDescription) -> "Embedded":
    """Return an engine in this process, for a policy file or the name of a shipped policy."""
    # The controller's packages, which a job with a controller need not have.
    from trimtab.agent.embedded import Embedded  # noqa: PLC0415

    path = Path(policy)
    if not path.suffix:
        path = Path(str(files("trimtab.policies") / f"{policy}.yaml"))
    return Embedded(path, store or "sqlite:///trimtab.db", job)
