"""The agent without a controller: the same engine, policy and journal, in the leader's process.

In place of `Channel`, with a thread of its own: the training thread only appends to a queue and
reads an attribute.  Needs the controller's packages (trimtab[controller]), but no Ray and no port.
"""

import atexit
import logging
import threading
from collections import deque
from pathlib import Path

from trimtab.agent.channel import KEPT_OBSERVATIONS, JobDescription
from trimtab.controller.engine.model import Ack, ArmedTable, Directive, Event, Observation
from trimtab.controller.journal import Journal
from trimtab.controller.run import Run

log = logging.getLogger(__name__)


class Embedded:
    """Steers the job from its own leader."""

    def __init__(self, policy: Path, store: str, job: JobDescription) -> None:
        """Read the policy, bring back what the journal has of the run, and start.

        Args:
            policy: A policy file.
            store: SQLAlchemy URL of the journal.
            job: What the job is and measures.

        Raises:
            OSError, ValueError: If the policy cannot be read, with place and reason.
            sqlalchemy.exc.SQLAlchemyError: If the journal cannot be opened.
        """
        self.directives: deque[Directive] = deque()
        """Directives that were decided on and not taken up yet."""
        self.dropped = 0
        """Observations that were never judged: the engine fell behind."""
        journal = Journal(store)
        self._run = Run(job.run, (policy.name, policy.read_text()), journal)
        epoch = journal.epoch_of(job.run, job.session, job.world_size, job.optimizer)
        self._run.register(epoch, job.layout)
        self.table: ArmedTable | None = self._run.state.table
        """The newest armed table."""
        self._undelivered: list[Directive] = []
        self._queue: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="trimtab-embedded", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def send(self, message: Observation | Ack) -> None:
        """Queue a message; never waits."""
        with self._changed:
            self._queue.append(message)
            if len(self._queue) > KEPT_OBSERVATIONS:
                self._queue.popleft()
                self.dropped += 1
            self._changed.notify()

    def close(self, timeout_s: float = 2.0) -> None:
        """Judge and write what is queued, at most for `timeout_s`.  Safe to call again."""
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                events = list(self._queue)
                self._queue.clear()
                closing = self._closing
            for event in events:
                self._guarded(event)
            self._write(with_snapshot=closing)
            if closing and not self._queue:
                self._run.journal.close()
                return

    def _guarded(self, event: Event) -> None:
        try:
            outputs = self._run.move(event)
        except Exception as error:  # noqa: BLE001  the last wall before the training
            self._say(f"an observation cannot be judged: {error!r}")
            return
        self.table = outputs.table or self.table
        self._undelivered += outputs.directives

    def _write(self, *, with_snapshot: bool) -> None:
        """Write what is new; only what is written is carried out."""
        unwritten = self._run.unwritten(with_snapshot=with_snapshot)
        if unwritten is not None:
            try:
                self._run.journal.append(self._run.run, unwritten.entries, unwritten.snapshot)
            except Exception as error:  # noqa: BLE001  a full disk must not reach the training
                self._say(f"the journal cannot be written, so no directive is sent: {error}")
                return
            self._run.written(unwritten)
        self.directives.extend(self._undelivered)
        self._undelivered = []

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.error("trimtab: %s", message)
