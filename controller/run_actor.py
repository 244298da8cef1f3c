"""One run's actor: events in order through the engine, the journal before a directive is sent.

Hosts the run's own gRPC server, so that observations never hop through Ray.  Made by the gateway;
when Ray restarts it after a crash, it replays the journal.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import sqlalchemy.exc

from trimtab.controller.engine.model import (
    Climbed,
    Decision,
    Directive,
    Event,
    Intervention,
    Layout,
    Observation,
    Rebaselined,
    Record,
    Registered,
)
from trimtab.controller.engine.sketch import with_dips
from trimtab.controller.engine.snapshot import adopt, restore, snapshot
from trimtab.controller.engine.state import State
from trimtab.controller.engine.step import Outputs, step
from trimtab.controller.journal import Entry, Journal
from trimtab.controller.loader import parse_policy
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import trimtab_pb2_grpc as rpc
from trimtab.protos import wire

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.2
"""Observations without a decision are written at least this often."""

SNAPSHOT_EVERY_EVENTS = 1000
"""Replay after a crash is at most this long."""

MAX_UNWRITTEN_EVENTS = 20_000
"""Events kept while the store is gone; the agent keeps the newest observations too."""

SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def log_to_stderr() -> None:
    """Let an actor's log reach its standard error, which Ray passes on to the controller's."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


class RunActor(rpc.SteeringServicer):
    """The only owner of a run's state."""

    def __init__(self, run: str, policy: tuple[str, str], store: str, host: str) -> None:
        """Bring the state back from the journal, under the policy (name, text) of now."""
        log_to_stderr()
        self._run = run
        self._host = host
        self._journal = Journal(store)
        name, text = policy
        self._policy = parse_policy(text, name)
        self._journal.save_policy(self._policy.version, name, text)
        self._state = self._replayed()
        self._unwritten: list[Entry] = []
        self._written_events = 0
        self._durable_seq = self._state.seq
        self._undelivered: list[Directive] = []
        self._writing = asyncio.Lock()
        self._address = ""
        self._server: grpc.aio.Server | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._stream = 0
        self._connected = False
        self._last_observation_timestamp_s = 0.0
        self._journal_errors = 0
        self._late_steps = 0
        self._unarmed_steps = 0
        # The first policy too: a replay under a later one must not judge the past by it.
        if self._state.epoch < 0 or self._state.policy.version != self._policy.version:
            self._state = adopt(self._state, self._policy)
            self._remember(self._policy.version, Outputs())

    async def register(
        self, session: str, world_size: int, optimizer: str, layout: Layout
    ) -> tuple[int, str, str]:
        """Return a session's epoch, the address of the run's server and the policy version."""
        await self._start()
        epoch = await asyncio.to_thread(
            self._journal.epoch_of, self._run, session, world_size, optimizer
        )
        if epoch > self._state.epoch:
            self._move(Registered(epoch=epoch, layout=layout))
            await self._write()
            self._durable_seq = -1
        for rule, missing in self._state.inactive.items():
            log.warning(
                "run=%s rule=%s is inactive: the job does not measure %s",
                self._run,
                rule,
                ", ".join(sorted(missing)),
            )
        return epoch, self._address, self._policy.version

    async def status(self) -> dict[str, Any]:
        """Return what the exporter and the CLI show of the run."""
        state = self._state
        return {
            "run": self._run,
            "epoch": state.epoch,
            "seq": state.seq,
            "step": state.step,
            "values": dict(state.values),
            "lr_factor": state.lr_factor,
            "counts": dict(state.counts),
            "phases": {
                rule.name: state.rules[rule.name].phase(rule, state.tick).value
                for rule in state.policy.rules
            },
            "actions": sorted({(r.name, c.action.value) for r, _, c in state.policy.calls()}),
            "inactive": {rule: sorted(missing) for rule, missing in state.inactive.items()},
            "rungs": {rule.name: state.rules[rule.name].rung for rule in state.policy.rules},
            "modes": {rule.name: rule.mode.value for rule in state.policy.rules},
            "policy_version": state.policy.version,
            "last_observation_timestamp_s": self._last_observation_timestamp_s,
            "connected": self._connected,
            "journal_errors": self._journal_errors,
            "journal_lag_steps": state.seq - self._durable_seq,
            "late_steps": self._late_steps,
            "unarmed_steps": self._unarmed_steps,
        }

    async def stop(self) -> None:
        """Write what is left and close the server."""
        if self._flusher is not None:
            self._flusher.cancel()
        if self._server is not None:
            await self._server.stop(grace=0.2)
        await self._write(with_snapshot=True)
        self._journal.close()

    async def Steer(  # noqa: N802  gRPC's name
        self, requests: AsyncIterator[pb.AgentMessage], context: Any
    ) -> AsyncIterator[pb.ControllerMessage]:
        """Take the leader's observations and acks; give tables and directives."""
        self._stream += 1  # a newer stream ends an older one that hangs
        stream = self._stream
        hello = (await anext(aiter(requests))).hello
        if hello.run != self._run or hello.epoch != self._state.epoch:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"run {hello.run} epoch {hello.epoch} is not run {self._run} epoch"
                f" {self._state.epoch}: register again",
            )
        self._connected = True
        try:
            yield self._table_message(with_residuals=True)
            if await self._write():
                self._undelivered = []
                for directive in list(self._state.outstanding.values()):
                    yield pb.ControllerMessage(directive=wire.pb_from_directive(directive))
            async for request in requests:
                if stream != self._stream:
                    await context.abort(grpc.StatusCode.ABORTED, "a newer stream took over")
                async for message in self._answer(request, context):
                    yield message
        finally:
            if stream == self._stream:
                self._connected = False

    async def _answer(
        self, request: pb.AgentMessage, context: Any
    ) -> AsyncIterator[pb.ControllerMessage]:
        try:
            event: Event
            if request.HasField("observation"):
                event = self._observation(request.observation)
            else:
                event = wire.ack_from_pb(request.ack)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        outputs = self._move(event)
        if outputs.table is not None:
            yield self._table_message()
        self._undelivered += outputs.directives
        if outputs.records and await self._write():
            for directive in self._undelivered:
                yield pb.ControllerMessage(directive=wire.pb_from_directive(directive))
            self._undelivered = []

    def _move(self, event: Event) -> Outputs:
        """Take one event through the engine and keep it for the journal."""
        if isinstance(event, Observation):
            if event.seq <= self._state.seq:  # sent again after a reconnect
                return Outputs(table=self._state.table)
            self._last_observation_timestamp_s = time.time()  # noqa: TID251  the clock at the rim
            lag = event.seq - event.verdict.table_seq
            self._unarmed_steps += event.verdict.table_seq < 0
            self._late_steps += event.verdict.table_seq >= 0 and lag > 1
        outputs = step(self._state, event)
        self._remember(event, outputs)
        for record in outputs.records:
            self._log(record)
        return outputs

    def _log(self, record: Record) -> None:
        """Write one line a record, for people and for log collectors."""
        if isinstance(record, Decision):
            log.info(
                "run=%s step=%d rule=%s action=%s mode=%s arguments=%s why=%s",
                self._run,
                record.step,
                record.rule,
                record.action,
                record.mode,
                dict(record.arguments),
                "; ".join(record.evidence),
            )
        elif isinstance(record, Intervention):
            log.info(
                "run=%s step=%d rule=%s action=%s outcome=%s detail=%s",
                self._run,
                record.step,
                record.rule,
                record.action,
                record.outcome,
                record.detail or "-",
            )
        elif isinstance(record, Rebaselined):
            log.warning(
                "run=%s step=%d a new level of %s is accepted after %d flagged values in a row",
                self._run,
                record.step,
                record.signal,
                record.flagged_steps,
            )
        elif isinstance(record, Climbed):
            log.warning(
                "run=%s step=%d rule=%s ladder at rung %d: %s",
                self._run,
                record.step,
                record.rule,
                record.rung,
                record.reason,
            )
        else:
            episode = record.episode
            log.info(
                "run=%s step=%d episode=%s from step %d, %d steps lost",
                self._run,
                episode.end_step,
                episode.kind,
                episode.onset_step,
                episode.steps_lost,
            )

    def _remember(self, event: Event | str, outputs: Outputs) -> None:
        self._unwritten.append(
            Entry(
                event=event,
                records=outputs.records,
                timestamp_s=time.time(),  # noqa: TID251  the clock at the rim
            )
        )
        if len(self._unwritten) > MAX_UNWRITTEN_EVENTS:
            del self._unwritten[0]

    async def _write(self, *, with_snapshot: bool = False) -> bool:
        """Write what is not written yet; return whether it is on disk now."""
        async with self._writing:
            entries, seq = list(self._unwritten), self._state.seq
            if not entries:
                return True
            due = self._written_events + len(entries) >= SNAPSHOT_EVERY_EVENTS or with_snapshot
            # As text, here: the state moves on while another thread writes.
            state = json.dumps(snapshot(self._state)) if due else None
            try:
                await asyncio.to_thread(self._journal.append, self._run, entries, state)
            except (sqlalchemy.exc.SQLAlchemyError, OSError) as error:
                self._journal_errors += 1
                log.error("run=%s the journal cannot be written: %s", self._run, error)  # noqa: TRY400
                return False
            del self._unwritten[: len(entries)]
            self._written_events = 0 if due else self._written_events + len(entries)
            self._durable_seq = seq
            return True

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            await self._write()

    async def _start(self) -> None:
        """Start the server; on the first call, since Ray runs `__init__` again after a crash."""
        if self._server is not None:
            return
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_SteeringServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"{self._host}:0")
        await self._server.start()
        self._address = f"{self._host}:{port}"
        self._flusher = asyncio.create_task(self._flush())

    def _table_message(self, *, with_residuals: bool = False) -> pb.ControllerMessage:
        table = wire.pb_from_table(
            self._state.table, self._durable_seq, with_residuals=with_residuals
        )
        return pb.ControllerMessage(table=table)

    def _observation(self, message: pb.Observation) -> Observation:
        layout = self._state.layout
        return with_dips(wire.observation_from_pb(message, layout), layout)

    def _replayed(self) -> State:
        saved, later = self._journal.load(self._run)
        state = State(self._policy)
        if saved is not None:
            state = restore(saved, self._saved_policy(saved["policy_version"]))
        for event in later:
            if isinstance(event, str):
                state = adopt(state, self._saved_policy(event))
            else:
                step(state, event)
        return state

    def _saved_policy(self, version: str) -> Any:
        name, text = self._journal.policy(version)
        return parse_policy(text, name)
