"""One run's actor: events in order through the engine, the journal before a directive is sent.

Hosts the run's own gRPC server, so that observations never hop through Ray.  Made by the gateway;
when Ray restarts it after a crash, it replays the journal.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import sqlalchemy.exc

from trimtab.controller.engine.model import (
    Directive,
    Event,
    Layout,
)
from trimtab.controller.journal import Journal
from trimtab.controller.run import Run
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import trimtab_pb2_grpc as rpc
from trimtab.protos import wire

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.2
"""Observations without a decision are written at least this often."""

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
    """Serves one run."""

    def __init__(self, run: str, policy: tuple[str, str], store: str, host: str) -> None:
        """Bring the state back from the journal, under the policy (name, text) of now."""
        log_to_stderr()
        self._host = host
        self._run = Run(run, policy, Journal(store))
        self._undelivered: list[Directive] = []
        self._writing = asyncio.Lock()
        self._registering = asyncio.Lock()
        self._address = ""
        self._server: grpc.aio.Server | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._stream = 0
        self._connected = False
        self._last_observation_timestamp_s = 0.0
        self._journal_errors = 0

    async def register(
        self, session: str, world_size: int, optimizer: str, layout: Layout
    ) -> tuple[int, str, str]:
        """Return a session's epoch, the address of the run's server and the policy version."""
        await self._start()
        async with self._registering:  # ranks of one job come together; one of them is the first
            epoch = await asyncio.to_thread(
                self._run.journal.epoch_of, self._run.run, session, world_size, optimizer
            )
            if self._run.register(epoch, layout):
                await self._write()
        return epoch, self._address, self._run.state.policy.version

    async def status(self) -> dict[str, Any]:
        """Return what the exporter and the CLI show of the run."""
        state = self._run.state
        return {
            "run": self._run.run,
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
            "journal_lag_steps": state.seq - self._run.durable_seq,
            "late_steps": self._run.late_steps,
            "unarmed_steps": self._run.unarmed_steps,
        }

    async def stop(self) -> None:
        """Write what is left and close the server."""
        if self._flusher is not None:
            self._flusher.cancel()
        if self._server is not None:
            await self._server.stop(grace=0.2)
        await self._write(with_snapshot=True)
        self._run.journal.close()

    async def Steer(  # noqa: N802  gRPC's name
        self, requests: AsyncIterator[pb.AgentMessage], context: Any
    ) -> AsyncIterator[pb.ControllerMessage]:
        """Take the leader's observations and acks; give tables and directives."""
        self._stream += 1  # a newer stream ends an older one that hangs
        stream = self._stream
        hello = (await anext(aiter(requests))).hello
        run, epoch = self._run.run, self._run.state.epoch
        if (hello.run, hello.epoch) != (run, epoch):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"run {hello.run} epoch {hello.epoch} is not run {run} epoch {epoch}:"
                " register again",
            )
        self._connected = True
        try:
            yield self._table_message(with_residuals=True)
            if await self._write():
                self._undelivered = []
                for directive in list(self._run.state.outstanding.values()):
                    yield pb.ControllerMessage(directive=wire.pb_from_directive(directive))
            async for request in requests:
                if stream != self._stream:
                    await context.abort(grpc.StatusCode.ABORTED, "a newer stream took over")
                async for message in self._answer(request, context):
                    yield message
        finally:
            if stream == self._stream:
                self._connected = False

    async def Report(  # noqa: N802  gRPC's name
        self, request: pb.RankSamples, context: Any
    ) -> pb.ReportResponse:
        """Keep what a rank tells of some steps."""
        run, epoch = self._run.run, self._run.state.epoch
        if (request.run, request.epoch) != (run, epoch):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"run {run} is at epoch {epoch}: register again",
            )
        try:
            await asyncio.to_thread(
                self._run.journal.append_rank_samples,
                run,
                epoch,
                request.rank,
                [wire.rank_sample_from_pb(sample) for sample in request.samples],
            )
        except (sqlalchemy.exc.SQLAlchemyError, OSError) as error:
            self._journal_errors += 1
            log.error("run=%s rank samples cannot be written: %s", run, error)  # noqa: TRY400
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the journal cannot be written")
        return pb.ReportResponse()

    async def _answer(
        self, request: pb.AgentMessage, context: Any
    ) -> AsyncIterator[pb.ControllerMessage]:
        try:
            event: Event
            if request.HasField("observation"):
                event = wire.observation_from_pb(request.observation, self._run.state.layout)
                self._last_observation_timestamp_s = time.time()  # noqa: TID251  the clock
            else:
                event = wire.ack_from_pb(request.ack)
            outputs = self._run.move(event)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        if outputs.table is not None:
            yield self._table_message()
        self._undelivered += outputs.directives
        if outputs.records and await self._write():
            for directive in self._undelivered:
                yield pb.ControllerMessage(directive=wire.pb_from_directive(directive))
            self._undelivered = []

    async def _write(self, *, with_snapshot: bool = False) -> bool:
        """Write what is not written yet; return whether it is on disk now."""
        async with self._writing:
            unwritten = self._run.unwritten(with_snapshot=with_snapshot)
            if unwritten is None:
                return True
            try:
                await asyncio.to_thread(
                    self._run.journal.append,
                    self._run.run,
                    unwritten.entries,
                    unwritten.snapshot,
                )
            except (sqlalchemy.exc.SQLAlchemyError, OSError) as error:
                self._journal_errors += 1
                log.error(  # noqa: TRY400
                    "run=%s the journal cannot be written: %s", self._run.run, error
                )
                return False
            self._run.written(unwritten)
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
            self._run.state.table, self._run.durable_seq, with_residuals=with_residuals
        )
        return pb.ControllerMessage(table=table)
