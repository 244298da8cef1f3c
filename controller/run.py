"""One run: its engine state, and what of it is not in the journal yet.

Used by the run's actor, and by an agent that steers its own job.  No network; writes when told to.
"""

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from trimtab.controller.engine.model import (
    Climbed,
    Decision,
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

log = logging.getLogger(__name__)

SNAPSHOT_EVERY_EVENTS = 1000
"""Replay after a crash is at most this long."""

MAX_UNWRITTEN_EVENTS = 20_000
"""Events kept while the store is gone; the agent keeps the newest observations too."""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """What one call of `Journal.append` takes."""

    entries: list[Entry]
    snapshot: str | None
    seq: int
    """Of the last observation in it."""


class Run:
    """The only owner of a run's state."""

    def __init__(self, run: str, policy: tuple[str, str], journal: Journal) -> None:
        """Bring the state back from the journal, under the policy (name, text) of now."""
        self.run = run
        self.journal = journal
        self.durable_seq = -1
        """Observations up to this seq are on disk."""
        self.late_steps = 0
        """Steps that were judged by a table older than the step before."""
        self.unarmed_steps = 0
        """Steps that were judged by the reflex alone."""
        name, text = policy
        now = parse_policy(text, name)
        journal.save_policy(now.version, name, text)
        self.state = self._replayed(State(now))
        self.durable_seq = self.state.seq
        self._unwritten: list[Entry] = []
        self._written_events = 0
        # The first policy too: a replay under a later one must not judge the past by it.
        if self.state.epoch < 0 or self.state.policy.version != now.version:
            self.state = adopt(self.state, now)
            self._remember(now.version, Outputs())

    def register(self, epoch: int, layout: Layout) -> bool:
        """Take a process group of the job; return whether it is a new one."""
        new = epoch > self.state.epoch
        if new:
            self.move(Registered(epoch=epoch, layout=layout))
            self.durable_seq = -1
            for rule, missing in self.state.inactive.items():
                log.warning(
                    "run=%s rule=%s is inactive: the job does not measure %s",
                    self.run,
                    rule,
                    ", ".join(sorted(missing)),
                )
        return new

    def move(self, event: Event) -> Outputs:
        """Take one event through the engine and keep it for the journal.

        Raises:
            ValueError: If an observation does not fit what the job registered.
        """
        if isinstance(event, Observation):
            if event.seq <= self.state.seq:  # sent again after a reconnect
                return Outputs(table=self.state.table)
            event = with_dips(event, self.state.layout)
            lag = event.seq - event.verdict.table_seq
            self.unarmed_steps += event.verdict.table_seq < 0
            self.late_steps += event.verdict.table_seq >= 0 and lag > 1
        outputs = step(self.state, event)
        self._remember(event, outputs)
        for record in outputs.records:
            self._log(record)
        return outputs

    def unwritten(self, *, with_snapshot: bool = False) -> Unwritten | None:
        """Return what is not on disk yet; None when there is nothing."""
        entries = list(self._unwritten)
        if not entries:
            return None
        due = self._written_events + len(entries) >= SNAPSHOT_EVERY_EVENTS or with_snapshot
        # As text, at once: the state moves on while another thread writes.
        text = json.dumps(snapshot(self.state)) if due else None
        return Unwritten(entries, text, self.state.seq)

    def written(self, done: Unwritten) -> None:
        """Take note that it is on disk."""
        del self._unwritten[: len(done.entries)]
        count = self._written_events + len(done.entries)
        self._written_events = 0 if done.snapshot is not None else count
        self.durable_seq = done.seq

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

    def _replayed(self, state: State) -> State:
        saved, later = self.journal.load(self.run)
        if saved is not None:
            state = restore(saved, self._saved_policy(saved["policy_version"]))
        for event in later:
            if isinstance(event, str):
                state = adopt(state, self._saved_policy(event))
            else:
                step(state, event)
        return state

    def _saved_policy(self, version: str) -> Any:
        name, text = self.journal.policy(version)
        return parse_policy(text, name)

    def _log(self, record: Record) -> None:
        """Write one line a record, for people and for log collectors."""
        if isinstance(record, Decision):
            log.info(
                "run=%s step=%d rule=%s action=%s mode=%s arguments=%s why=%s",
                self.run,
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
                self.run,
                record.step,
                record.rule,
                record.action,
                record.outcome,
                record.detail or "-",
            )
        elif isinstance(record, Rebaselined):
            log.warning(
                "run=%s step=%d a new level of %s is accepted after %d flagged values in a row",
                self.run,
                record.step,
                record.signal,
                record.flagged_steps,
            )
        elif isinstance(record, Climbed):
            log.warning(
                "run=%s step=%d rule=%s ladder at rung %d: %s",
                self.run,
                record.step,
                record.rule,
                record.rung,
                record.reason,
            )
        else:
            episode = record.episode
            log.info(
                "run=%s step=%d episode=%s from step %d, %d steps lost",
                self.run,
                episode.end_step,
                episode.kind,
                episode.onset_step,
                episode.steps_lost,
            )
