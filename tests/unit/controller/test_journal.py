"""The journal: what was written comes back, in order, and builds the same state."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
import sqlalchemy.exc
from drive import SKIP_LOUD_LOSS, Job

from trimtab.controller.engine.model import (
    Ack,
    Event,
    Layout,
    Observation,
    Outcome,
    Rebaselined,
    Registered,
    Verdict,
    VerdictKind,
)
from trimtab.controller.engine.snapshot import restore, snapshot
from trimtab.controller.engine.state import State
from trimtab.controller.engine.step import step
from trimtab.controller.journal import Entry, Journal
from trimtab.controller.loader import parse_policy


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(f"sqlite:///{tmp_path}/j.db")
    yield opened
    opened.close()


def a_run(steps: int = 120) -> list[Event]:
    """The events of a run in which the loss jumps for good."""
    job = Job(SKIP_LOUD_LOSS + "rebaseline: 5 steps\n")
    events: list[Event] = [Registered(epoch=0, layout=Layout(signals=("loss",)))]
    for at in range(steps):
        values = {"loss": math.nan if at == 90 else 2.0 + at % 3 / 10 + (6.0 if at > 70 else 0.0)}
        verdict = job.step(**values)
        events.append(Observation(seq=at, step=at, values=values, verdict=verdict, batch=at))
    return events


def test_events_come_back_as_they_were(journal: Journal) -> None:
    events: list[Event | str] = [
        "0123456789ab",
        Registered(epoch=1, layout=Layout(signals=("loss", "lr"))),
        Observation(
            seq=3,
            step=2,
            values={"loss": 0.1 + 0.2, "lr": math.inf},
            verdict=Verdict(kind=VerdictKind.VETO, rule="reflex", table_seq=-1),
            lr_factor=0.5,
        ),
        Ack(id="x", epoch=1, seq=3, step=3, outcome=Outcome.PENDING, detail="done"),
    ]
    journal.append("run", [Entry(event=event, timestamp_s=1.0) for event in events])
    journal.append("other", [Entry(event="ffffffffffff", timestamp_s=1.0)])
    assert journal.load("run") == (None, events)


def test_a_replay_from_a_snapshot_is_the_state_that_was(journal: Journal) -> None:
    policy = parse_policy(SKIP_LOUD_LOSS + "rebaseline: 5 steps\n", "p.yaml")
    live, records = State(policy), []
    for at, event in enumerate(a_run()):
        outputs = step(live, event)
        records += outputs.records
        saved = json.dumps(snapshot(live)) if at == 60 else None
        journal.append("run", [Entry(event=event, records=outputs.records, timestamp_s=at)], saved)
    body, later = journal.load("run")
    assert body is not None
    assert len(later) == 60
    replayed = restore(body, policy)
    for event in later:
        assert not isinstance(event, str)
        step(replayed, event)
    assert json.dumps(snapshot(replayed)) == json.dumps(snapshot(live))
    assert replayed.table == live.table
    assert any(isinstance(record, Rebaselined) for record in records)


def test_an_intervention_is_one_row_with_its_last_outcome_and_evidence(journal: Journal) -> None:
    job = Job()
    job.calm(50)
    job.step(loss=9.0)
    job.calm(10)
    records = tuple(job.records)
    journal.append("run", [Entry(event="x", records=records[:2], timestamp_s=1.0)])
    [pending] = journal.interventions("run")
    journal.append("run", [Entry(event="x", records=records[2:], timestamp_s=2.0)])
    [row] = journal.interventions()
    assert (pending["outcome"], row["outcome"], row["step"]) == ("pending", "recovered", 50)
    assert json.loads(row["evidence"])[0].startswith("loss = 9 > ")
    assert journal.interventions("another") == []


def test_a_session_keeps_its_epoch_and_a_new_one_gets_the_next(journal: Journal) -> None:
    epochs = [journal.epoch_of("run", session, 2, "AdamW") for session in "aabab"]
    assert epochs == [0, 0, 1, 0, 1]
    assert journal.epoch_of("other", "a", 1, "AdamW") == 0


def test_a_policy_is_kept_once(journal: Journal) -> None:
    for _ in range(2):
        journal.save_policy("v", "p.yaml", "text")
    assert journal.policy("v") == ("p.yaml", "text")


def test_an_append_that_fails_leaves_nothing_of_itself(journal: Journal) -> None:
    job = Job()
    job.calm(50)
    job.step(loss=9.0)
    entry = Entry(event="x", records=tuple(job.records), timestamp_s=1.0)
    journal.append("run", [entry])
    with pytest.raises(sqlalchemy.exc.IntegrityError):  # the same decision a second time
        journal.append("run", [Entry(event="y", timestamp_s=2.0), entry])
    assert journal.load("run")[1] == ["x"]


def test_a_full_disk_is_an_error_that_the_actor_can_catch(journal: Journal) -> None:
    with journal._engine.connect() as connection:
        connection.execute(sa.text("PRAGMA max_page_count = 1"))
        pages = connection.execute(sa.text("PRAGMA max_page_count")).scalar_one()
    assert pages > 1
    entries = [Entry(event=f"{at:012}", timestamp_s=1.0) for at in range(100_000)]
    with pytest.raises(sqlalchemy.exc.OperationalError, match="full"):
        journal.append("run", entries)
    assert journal.load("run")[1] == []
