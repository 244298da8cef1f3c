"""This rank's own line to the controller: what only one rank knows of a step.

A thread of its own and a bounded queue: the training thread appends and goes on, whatever happens
here.  Numbers that are still on a device are read by the thread, not by the training.
"""

import atexit
import logging
import os
import resource
import threading
from collections import deque
from dataclasses import dataclass

import grpc
import tenacity
import torch
from torch import Tensor

from trimtab.agent.channel import (
    OPTIONS,
    RECONNECT_FIRST_S,
    RECONNECT_MAX_S,
    JobDescription,
    registered,
)
from trimtab.controller.engine.model import RankSample
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import trimtab_pb2_grpc as rpc
from trimtab.protos import wire

log = logging.getLogger(__name__)

KEPT_SAMPLES = 2_000
"""Samples kept for a controller that is away; older ones are dropped and counted."""

SENT_EVERY_S = 1.0
SENT_AT_ONCE = 500
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample whose numbers may still be on a device."""

    seq: int
    step: int
    loss: Tensor | float | None
    step_time_s: float
    nonfinite: Tensor | float
    batch_ids: tuple[str, ...]
    dataset: str


class Reporter:
    """Sends this rank's samples as well as it can."""

    def __init__(self, address: str, job: JobDescription, rank: int) -> None:
        """Start the thread.

        Args:
            address: Of the controller's gateway.
            job: The same on every rank, the session included.
            rank: This one.
        """
        self.dropped = 0
        """Samples that no controller will ever see."""
        self._address, self._job, self._rank = address, job, rank
        self._queue: deque[Sample] = deque()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._said = ""
        self._thread = threading.Thread(target=self._work, name="trimtab-reporter", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def send(self, sample: Sample) -> None:
        """Queue a sample; never waits."""
        if self._pid != os.getpid():  # a fork has the queue, but not the thread
            return
        with self._lock:
            self._queue.append(sample)
            if len(self._queue) > KEPT_SAMPLES:
                self._queue.popleft()
                self.dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, at most for `timeout_s`.  Safe to call again."""
        atexit.unregister(self.close)
        self._closing.set()
        if self._pid == os.getpid():
            self._thread.join(timeout_s)

    def _work(self) -> None:
        waiting = tenacity.wait_random_exponential(RECONNECT_FIRST_S, RECONNECT_MAX_S)
        retrying = tenacity.Retrying(
            wait=waiting,
            stop=tenacity.stop_when_event_set(self._closing),
            sleep=tenacity.sleep_using_event(self._closing),
            before_sleep=self._say,
        )
        while not self._closing.is_set():
            try:
                retrying(self._converse)
            except tenacity.RetryError:
                return
            except Exception:  # the last wall before the training process
                log.exception("trimtab: rank samples are no longer sent; the job trains on")
                return

    def _converse(self) -> None:
        """Register, then send what comes until the guard closes."""
        answer = registered(self._address, self._job)
        with grpc.insecure_channel(answer.address, options=OPTIONS) as connection:
            steering = rpc.SteeringStub(connection)
            while True:
                closing = self._closing.wait(SENT_EVERY_S)
                while samples := self._taken():
                    try:
                        message = self._message(samples, answer.epoch)
                    except Exception as error:  # noqa: BLE001  a sample that is none
                        self.dropped += len(samples)
                        log.warning("trimtab: rank samples cannot be sent: %r", error)
                        continue
                    try:
                        steering.Report(message, timeout=TIMEOUT_S)
                    except grpc.RpcError:
                        self._put_back(samples)
                        raise
                if closing:
                    return

    def _taken(self) -> list[Sample]:
        with self._lock:
            return [self._queue.popleft() for _ in range(min(SENT_AT_ONCE, len(self._queue)))]

    def _put_back(self, samples: list[Sample]) -> None:
        with self._lock:
            self._queue.extendleft(reversed(samples))
            while len(self._queue) > KEPT_SAMPLES:
                self._queue.popleft()
                self.dropped += 1

    def _message(self, samples: list[Sample], epoch: int) -> pb.RankSamples:
        memory = _memory_bytes()
        return pb.RankSamples(
            run=self._job.run,
            epoch=epoch,
            rank=self._rank,
            samples=[
                wire.pb_from_rank_sample(
                    RankSample(
                        seq=told.seq,
                        step=told.step,
                        loss=None if told.loss is None else float(told.loss),
                        step_time_s=told.step_time_s,
                        memory_bytes=memory,
                        nonfinite=float(told.nonfinite) > 0,
                        batch_ids=told.batch_ids,
                        dataset=told.dataset,
                    )
                )
                for told in samples
            ],
        )

    def _say(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        reason = str(error.details()) if isinstance(error, grpc.Call) else str(error)
        if reason != self._said and not self._closing.is_set():
            log.info("trimtab: rank samples wait for the controller: %s", reason)
            self._said = reason


def _memory_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
