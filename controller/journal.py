"""What happened, in order, on disk: inputs of the engine, what it wanted, and how that ended.

Written by a run's actor before a directive is sent; replayed when the actor starts again.  SQLite
(WAL) by default, any SQLAlchemy URL for several nodes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, assert_never

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from trimtab.controller.engine.model import (
    Ack,
    Change,
    Climbed,
    Decision,
    Event,
    Graded,
    Intervention,
    Layout,
    Observation,
    Outcome,
    RankSample,
    Rebaselined,
    Record,
    Registered,
    Verdict,
    VerdictKind,
)

KEPT_SAMPLE_STEPS = 20_000
"""Steps of which a rank's samples are kept."""

metadata = sa.MetaData()

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("version", sa.String(12), primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)
sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True),
    sa.Column("session", sa.Text, nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("optimizer", sa.Text, nullable=False),
)
events = sa.Table(
    "events",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("run", sa.Text, nullable=False, index=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("timestamp_s", sa.Float, nullable=False),
)


def _what_and_when() -> list[sa.Column[Any]]:
    """Return the columns that tell a decision, and what became of it, apart."""
    return [
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("rule", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
    ]


decisions = sa.Table(
    "decisions",
    metadata,
    *_what_and_when(),
    sa.Column("mode", sa.Text, nullable=False),
    sa.Column("arguments", sa.Text, nullable=False),
    sa.Column("options", sa.Text, nullable=False),
    sa.Column("evidence", sa.Text, nullable=False),
    sa.Column("layers", sa.Text, nullable=False),
    sa.Column("close", sa.Text, nullable=False),
    sa.Column("rung", sa.Integer, nullable=False),
    sa.Column("labels", sa.Text, nullable=False),
    sa.Column("summary", sa.Text, nullable=False),
    sa.Column("timestamp_s", sa.Float, nullable=False),
)
interventions = sa.Table(
    "interventions",
    metadata,
    *_what_and_when(),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("outcome_seq", sa.BigInteger, nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
)
rebaselines = sa.Table(
    "rebaselines",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("signal", sa.Text, primary_key=True),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("flagged_steps", sa.BigInteger, nullable=False),
)
climbs = sa.Table(
    "climbs",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("run", sa.Text, nullable=False, index=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("rule", sa.Text, nullable=False),
    sa.Column("rung", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
)
episodes = sa.Table(
    "episodes",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("run", sa.Text, nullable=False, index=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("onset_step", sa.BigInteger, nullable=False),
    sa.Column("peak_step", sa.BigInteger, nullable=False),
    sa.Column("end_step", sa.BigInteger, nullable=False),
    sa.Column("peak", sa.Float),
    sa.Column("level_before", sa.Float),
    sa.Column("level_after", sa.Float),
    sa.Column("steps_lost", sa.BigInteger, nullable=False),
    sa.Column("leads", sa.Text, nullable=False),
    sa.Column("datasets", sa.Text, nullable=False),
)
rank_samples = sa.Table(
    "rank_samples",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("rank", sa.Integer, primary_key=True),
    sa.Column("step", sa.BigInteger, nullable=False, index=True),
    sa.Column("loss", sa.Float),
    sa.Column("step_time_s", sa.Float, nullable=False),
    sa.Column("memory_bytes", sa.BigInteger, nullable=False),
    sa.Column("nonfinite", sa.Boolean, nullable=False),
    sa.Column("batch_ids", sa.Text, nullable=False),
    sa.Column("dataset", sa.Text, nullable=False),
)
snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("event_id", sa.BigInteger, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One move of the engine: what moved it, when, and what it wrote down."""

    event: Event | str
    """An event, or the version of a policy that came into force."""
    records: tuple[Record, ...] = ()
    timestamp_s: float
    """Unix time."""


class Journal:
    """One store, shared by all runs of a controller.

    Every method is one transaction, or none on an error (sqlalchemy.exc.SQLAlchemyError).
    """

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url)
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _make_sqlite_durable)
        metadata.create_all(self._engine)

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    def save_policy(self, version: str, name: str, text: str) -> None:
        """Keep a policy's text, so that a replay can read it."""
        with self._engine.begin() as connection:
            known = connection.execute(
                sa.select(policies.c.version).where(policies.c.version == version)
            ).first()
            if known is None:
                connection.execute(policies.insert().values(version=version, name=name, text=text))

    def policy(self, version: str) -> tuple[str, str]:
        """Return name and text of a policy that was saved."""
        with self._engine.connect() as connection:
            row = connection.execute(
                sa.select(policies.c.name, policies.c.text).where(policies.c.version == version)
            ).one()
            return row.name, row.text

    def epoch_of(self, run: str, session: str, world_size: int, optimizer: str) -> int:
        """Return a session's epoch; a session that is new to the run gets the next one."""
        with self._engine.begin() as connection:
            known = connection.execute(
                sa.select(sessions.c.epoch).where(
                    sessions.c.run == run, sessions.c.session == session
                )
            ).scalar()
            if known is not None:
                return int(known)
            newest = connection.execute(
                sa.select(sa.func.max(sessions.c.epoch)).where(sessions.c.run == run)
            ).scalar()
            epoch = 0 if newest is None else int(newest) + 1
            connection.execute(
                sessions.insert().values(
                    run=run,
                    epoch=epoch,
                    session=session,
                    world_size=world_size,
                    optimizer=optimizer,
                )
            )
            return epoch

    def append(self, run: str, entries: Sequence[Entry], snapshot: str | None = None) -> None:
        """Write entries in order; with them, if given, the state after the last one, as JSON."""
        with self._engine.begin() as connection:
            connection.execute(events.insert(), [_event_row(run, entry) for entry in entries])
            for entry in entries:
                for record in entry.records:
                    _write_record(connection, run, record, entry.timestamp_s)
            if snapshot is not None:
                last = connection.execute(
                    sa.select(sa.func.max(events.c.id)).where(events.c.run == run)
                ).scalar()
                connection.execute(snapshots.delete().where(snapshots.c.run == run))
                connection.execute(snapshots.insert().values(run=run, event_id=last, body=snapshot))

    def load(self, run: str) -> tuple[dict[str, Any] | None, list[Event | str]]:
        """Return the newest snapshot and what came after it."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(snapshots).where(snapshots.c.run == run)).first()
            later = sa.select(events.c.kind, events.c.body).where(
                events.c.run == run, events.c.id > (row.event_id if row else 0)
            )
            rows = connection.execute(later.order_by(events.c.id)).all()
        snapshot = json.loads(row.body) if row else None
        return snapshot, [_event_from_row(kind, json.loads(body)) for kind, body in rows]

    def append_rank_samples(
        self, run: str, epoch: int, rank: int, samples: Sequence[RankSample]
    ) -> None:
        """Write what a rank tells of some steps; forget what is older than KEPT_SAMPLE_STEPS."""
        if not samples:
            return
        of_rank = {"run": run, "epoch": epoch, "rank": rank}
        sent = [s.seq for s in samples]
        mine = (
            (rank_samples.c.run == run)
            & (rank_samples.c.epoch == epoch)
            & (rank_samples.c.rank == rank)
        )
        rows = [
            of_rank | asdict(sample) | {"batch_ids": json.dumps(sample.batch_ids)}
            for sample in samples
        ]
        with self._engine.begin() as connection:
            # Sent again after an answer that got lost.
            connection.execute(rank_samples.delete().where(mine, rank_samples.c.seq.in_(sent)))
            connection.execute(rank_samples.insert(), rows)
            connection.execute(
                rank_samples.delete().where(
                    mine, rank_samples.c.seq < max(sent) - KEPT_SAMPLE_STEPS
                )
            )

    def rank_samples(
        self, run: str, first_step: int, last_step: int
    ) -> list[tuple[int, int, RankSample]]:
        """Return (epoch, rank, sample) of the steps first to last, by step, then by rank."""
        columns = rank_samples.c
        query = sa.select(rank_samples).where(
            columns.run == run, columns.step >= first_step, columns.step <= last_step
        )
        with self._engine.connect() as connection:
            rows = connection.execute(
                query.order_by(columns.epoch, columns.seq, columns.rank)
            ).mappings()
            return [
                (
                    row["epoch"],
                    row["rank"],
                    RankSample(
                        **{
                            field.name: row[field.name]
                            for field in fields(RankSample)
                            if field.name != "batch_ids"
                        },
                        batch_ids=tuple(json.loads(row["batch_ids"])),
                    ),
                )
                for row in rows
            ]

    def runs(self) -> list[str]:
        """Return the ids of all runs that ever registered."""
        with self._engine.connect() as connection:
            return list(connection.execute(sa.select(sessions.c.run).distinct()).scalars())

    def interventions(self, run: str = "") -> list[RowMapping]:
        """Return the interventions of a run, or of all, with their evidence, oldest first."""
        joined = interventions.outerjoin(
            decisions,
            (decisions.c.run == interventions.c.run) & (decisions.c.id == interventions.c.id),
        )
        query = sa.select(
            interventions,
            *(
                decisions.c[name]
                for name in ("evidence", "arguments", "options", "layers", "close")
            ),
            decisions.c.timestamp_s,
        ).select_from(joined)
        if run:
            query = query.where(interventions.c.run == run)
        order = (decisions.c.timestamp_s, interventions.c.epoch, interventions.c.seq)
        with self._engine.connect() as connection:
            return list(connection.execute(query.order_by(*order)).mappings())


def _make_sqlite_durable(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")  # readers do not hold up the writer
    cursor.execute("PRAGMA synchronous=NORMAL")  # survives a crash of the process
    cursor.execute("PRAGMA busy_timeout=5000")  # one writer a run, several runs a file
    cursor.close()


def _event_row(run: str, entry: Entry) -> dict[str, Any]:
    event = entry.event
    match event:
        case str():
            kind, body = "policy", {"version": event}
        case Observation():
            kind = "observation"
            body = asdict(event)
        case Registered():
            kind, body = "registered", asdict(event)
        case Ack():
            kind, body = "ack", asdict(event)
        case _:
            assert_never(event)
    return {
        "run": run,
        "kind": kind,
        "body": json.dumps(body),
        "timestamp_s": entry.timestamp_s,
    }


def _event_from_row(kind: str, body: dict[str, Any]) -> Event | str:
    match kind:
        case "policy":
            return str(body["version"])
        case "observation":
            verdict = body["verdict"] | {"kind": VerdictKind(body["verdict"]["kind"])}
            return Observation(
                **body
                | {
                    "verdict": Verdict(**verdict),
                    "vectors": {name: tuple(v) for name, v in body["vectors"].items()},
                    "declared": tuple(map(Change, body["declared"])),
                    "ratio_sketch": tuple(body["ratio_sketch"]),
                }
            )
        case "registered":
            layout = {name: tuple(names) for name, names in body["layout"].items()}
            return Registered(epoch=body["epoch"], layout=Layout(**layout))
        case "ack":
            return Ack(**(body | {"outcome": Outcome(body["outcome"])}))
    raise ValueError(f"unknown kind of event {kind!r} in the journal")


def _write_record(connection: Connection, run: str, record: Record, timestamp_s: float) -> None:
    match record:
        case Decision():
            row = asdict(record) | {"timestamp_s": timestamp_s}
            for name in ("arguments", "options", "evidence", "layers", "close", "labels"):
                row[name] = json.dumps(row[name])
            connection.execute(decisions.insert().values(run=run, **row))
        case Intervention():
            row = asdict(record)
            at = (interventions.c.run == run) & (interventions.c.id == record.id)
            if connection.execute(interventions.update().where(at).values(**row)).rowcount == 0:
                connection.execute(interventions.insert().values(run=run, **row))
        case Rebaselined():
            connection.execute(rebaselines.insert().values(run=run, **asdict(record)))
        case Climbed():
            connection.execute(climbs.insert().values(run=run, **asdict(record)))
        case Graded():
            row = asdict(record.episode)
            row |= {name: json.dumps(row[name]) for name in ("leads", "datasets")}
            row |= {"epoch": record.epoch, "seq": record.seq}
            connection.execute(episodes.insert().values(run=run, **row))
        case _:
            assert_never(record)
