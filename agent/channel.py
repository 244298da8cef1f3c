"""The leader's line to the controller: observations out, tables and directives in.

One thread of its own; the training thread only appends to a queue and reads an attribute.  Knows no
torch.  A controller that is away, wrong or slow costs the training nothing but fresh tables.
"""

import atexit
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# gRPC stops its threads around every fork, and data loaders fork while a call of ours is under way:
# it then says so on stderr, or crashes.  Children of a training never call gRPC through us.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import tenacity

import trimtab
from trimtab.controller.engine.model import Ack, ArmedTable, Directive, Layout, Observation
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import trimtab_pb2_grpc as rpc
from trimtab.protos import wire

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 5.0
RECONNECT_FIRST_S, RECONNECT_MAX_S = 0.1, 3.0
"""Wait before trying again: random, doubling from the first up to the greatest."""

KEPT_OBSERVATIONS = 10_000
"""Observations kept for a controller that is away; older ones are dropped and counted."""

OPTIONS = [
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """What a job says of itself when it registers."""

    run: str
    world_size: int
    layout: Layout
    optimizer: str
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


class Channel:
    """Keeps a stream to the controller open as well as it can be."""

    def __init__(self, address: str, job: JobDescription) -> None:
        self.table: ArmedTable | None = None
        """The newest armed table."""
        self.directives: deque[Directive] = deque()
        """Directives that came and were not taken up yet."""
        self.dropped = 0
        """Observations that no controller will ever see."""
        self._address = address
        self._job = job
        self._epoch = -1
        self._unsent: deque[Observation | Ack] = deque()
        self._sent: deque[Observation] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._said = ""
        self._connection: grpc.Channel | None = None
        self._thread = threading.Thread(target=self._run, name="trimtab-channel", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def send(self, message: Observation | Ack) -> None:
        """Queue a message; never waits."""
        with self._changed:
            self._unsent.append(message)
            while len(self._unsent) + len(self._sent) > KEPT_OBSERVATIONS:
                (self._sent or self._unsent).popleft()
                self.dropped += 1
            self._changed.notify()

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, at most for `timeout_s`, then hang up.  Safe to call again."""
        atexit.unregister(self.close)
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._connection is not None:  # a reader that waits for the controller wakes up
            self._connection.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            retrying = tenacity.Retrying(
                wait=tenacity.wait_random_exponential(RECONNECT_FIRST_S, RECONNECT_MAX_S),
                stop=tenacity.stop_when_event_set(self._closing),
                sleep=tenacity.sleep_using_event(self._closing),
                before_sleep=self._say_away,
            )
            try:
                retrying(self._converse)
            except tenacity.RetryError:
                return
            except Exception:  # the last wall before the training process
                log.exception("trimtab: the line to the controller broke down; the job trains on")
                return

    def _converse(self) -> None:
        """Register, then read the controller's messages until the stream ends."""
        answer = registered(self._address, self._job)
        self._epoch = answer.epoch
        with grpc.insecure_channel(answer.address, options=OPTIONS) as connection:
            self._connection = connection
            with self._changed:
                self._unsent.extendleft(reversed(self._sent))
                self._sent.clear()
            hung_up = threading.Event()
            try:
                messages = rpc.SteeringStub(connection).Steer(self._requests(hung_up))
                for message in messages:
                    self._say_connected()
                    self._receive(message)
            finally:
                hung_up.set()
                with self._changed:
                    self._changed.notify()
        if not self._closing.is_set():
            raise ConnectionError("the controller ended the stream")

    def _requests(self, hung_up: threading.Event) -> Iterator[pb.AgentMessage]:
        """Yield what is queued, as it comes.  Runs on a thread of gRPC's."""
        yield pb.AgentMessage(hello=pb.Hello(run=self._job.run, epoch=self._epoch))
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._unsent or hung_up.is_set() or self._closing.is_set()
                )
                if hung_up.is_set() or not self._unsent:
                    return
                message = self._unsent.popleft()
                if isinstance(message, Observation):
                    self._sent.append(message)
            if isinstance(message, Ack):
                yield pb.AgentMessage(ack=wire.pb_from_ack(message))
            else:
                observation = wire.pb_from_observation(message, self._job.layout)
                yield pb.AgentMessage(observation=observation)

    def _receive(self, message: pb.ControllerMessage) -> None:
        if message.HasField("directive"):
            self.directives.append(wire.directive_from_pb(message.directive))
            return
        self.table = wire.table_from_pb(message.table, self.table)
        with self._changed:
            while self._sent and self._sent[0].seq <= message.table.durable_seq:
                self._sent.popleft()

    def _say_away(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        reason = f"controller at {self._address}: {_reason(error)}"
        if reason != self._said and not self._closing.is_set():
            log.warning(
                "trimtab: %s; the job trains on, guarded by the last armed table until it expires,"
                " then by the reflex (non-finite values)",
                reason,
            )
            self._said = reason

    def _say_connected(self) -> None:
        if self._said:
            log.warning("trimtab: controller at %s is back", self._address)
            self._said = ""


def registered(address: str, job: JobDescription) -> pb.RegisterResponse:
    """Register a job, or a rank of one that is registered already, and return the answer.

    Raises:
        grpc.RpcError: If the controller is away, or refuses.
    """
    with grpc.insecure_channel(address, options=OPTIONS) as gateway:
        answer: pb.RegisterResponse = rpc.GatewayStub(gateway).Register(
            pb.RegisterRequest(
                protocol_version=wire.PROTOCOL_VERSION,
                run=job.run,
                session=job.session,
                world_size=job.world_size,
                signals=job.layout.signals,
                layer_groups=job.layout.layer_groups,
                layer_signals=job.layout.layer_signals,
                optimizer=job.optimizer,
                agent_version=trimtab.__version__,
            ),
            timeout=REGISTER_TIMEOUT_S,
        )
        return answer


def _reason(error: Any) -> str:
    if not isinstance(error, grpc.Call):  # what a failed call raises is its call object too
        return str(error)
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return "not reachable"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "is no trimtab controller of this protocol version"
    return str(error.details())
