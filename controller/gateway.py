"""The gateway actor: the controller's known port.  Registers jobs, makes run actors.

One per controller, made by the daemon.  Holds no state of a run.
"""

import asyncio
import json
import logging
import re
from typing import Any

import grpc
import ray

from trimtab.controller.engine.model import Layout
from trimtab.controller.journal import Journal
from trimtab.controller.run_actor import SERVER_OPTIONS, RunActor, log_to_stderr
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import trimtab_pb2_grpc as rpc
from trimtab.protos import wire

log = logging.getLogger(__name__)

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
"""What a run may be called: it becomes a label, an actor's name and part of a command line."""


class Gateway(rpc.GatewayServicer):
    """Answers on the controller's port."""

    def __init__(self, policy: tuple[str, str], store: str, host: str) -> None:
        """Take the policy (name, text) for all runs, the journal's URL and the host to bind to."""
        log_to_stderr()
        self._policy = policy
        self._store = store
        self._host = host
        self._journal = Journal(store)
        self._actors: dict[str, Any] = {}
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int) -> int:
        """Listen and return the port.

        Raises:
            RuntimeError: If the port is taken.
        """
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_GatewayServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"{self._host}:{port}")
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Stop listening, and let every run's actor write what it has."""
        if self._server is not None:
            await self._server.stop(grace=0.2)
        await asyncio.gather(*(actor.stop.remote() for actor in self._actors.values()))
        self._journal.close()

    async def statuses(self) -> list[dict[str, Any]]:
        """Return the status of every run that registered since the controller started."""
        return list(await asyncio.gather(*(a.status.remote() for a in self._actors.values())))

    async def Register(  # noqa: N802  gRPC's name
        self, request: pb.RegisterRequest, context: Any
    ) -> pb.RegisterResponse:
        """Give a job its epoch and the address of its run's server."""
        if request.protocol_version != wire.PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"speaks protocol version {wire.PROTOCOL_VERSION}, the agent"
                f" {request.protocol_version}: install the same trimtab on both sides",
            )
        if not RUN_NAME.fullmatch(request.run) or not request.session:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"run {request.run!r} is no name: letters, digits and . _ : / - , at most 128",
            )
        epoch, address, version = await self._actor(request.run).register.remote(
            request.session,
            request.world_size,
            request.optimizer,
            Layout(
                signals=tuple(request.signals),
                layer_groups=tuple(request.layer_groups),
                layer_signals=tuple(request.layer_signals),
            ),
        )
        log.info("run=%s registered epoch=%d at %s", request.run, epoch, address)
        return pb.RegisterResponse(epoch=epoch, address=address, policy_version=version)

    async def ListRuns(  # noqa: N802  gRPC's name
        self, _request: pb.ListRunsRequest, _context: Any
    ) -> pb.ListRunsResponse:
        """Return the runs that registered since the controller started."""
        return pb.ListRunsResponse(
            runs=[
                pb.Run(
                    run=status["run"],
                    epoch=status["epoch"],
                    step=status["step"],
                    values=status["values"],
                    interventions=sum(
                        count for key, count in status["counts"].items() if key[0] == "intervention"
                    ),
                    policy_version=status["policy_version"],
                    last_observation_timestamp_s=status["last_observation_timestamp_s"],
                    connected=status["connected"],
                )
                for status in await self.statuses()
            ]
        )

    async def ListInterventions(  # noqa: N802  gRPC's name
        self, request: pb.ListInterventionsRequest, _context: Any
    ) -> pb.ListInterventionsResponse:
        """Return what the journal has of a run's interventions, or of all."""
        rows = await asyncio.to_thread(self._journal.interventions, request.run)
        return pb.ListInterventionsResponse(
            interventions=[
                pb.Intervention(
                    run=row["run"],
                    id=row["id"],
                    epoch=row["epoch"],
                    step=row["step"],
                    rule=row["rule"],
                    action=row["action"],
                    outcome=row["outcome"],
                    detail=row["detail"],
                    evidence=json.loads(row["evidence"] or "[]"),
                    arguments=json.loads(row["arguments"] or "{}"),
                    options=json.loads(row["options"] or "{}"),
                    layers=json.loads(row["layers"] or "[]"),
                    close=json.loads(row["close"] or "[]"),
                )
                for row in rows
            ]
        )

    async def ListRankSamples(  # noqa: N802  gRPC's name
        self, request: pb.ListRankSamplesRequest, _context: Any
    ) -> pb.ListRankSamplesResponse:
        """Return what the ranks told of some steps of a run."""
        found = await asyncio.to_thread(
            self._journal.rank_samples, request.run, request.first_step, request.last_step
        )
        return pb.ListRankSamplesResponse(
            rows=[
                pb.ListRankSamplesResponse.Row(
                    epoch=epoch, rank=rank, sample=wire.pb_from_rank_sample(sample)
                )
                for epoch, rank, sample in found
            ]
        )

    def _actor(self, run: str) -> Any:
        if run not in self._actors:
            self._actors[run] = (
                ray.remote(RunActor)
                .options(
                    name=f"run:{run}",
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    max_restarts=-1,
                    max_task_retries=-1,
                )
                .remote(run, self._policy, self._store, self._host)
            )
        return self._actors[run]
