"""The values that flow through trimtab: observation in, armed table, decision and directive out.

Shared by agent and controller; `protos.wire` translates them to and from protobuf.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from trimtab.controller.engine.expression import Node

REFLEX = "reflex"
"""Name of the built-in rule: a non-finite value anywhere in the pending step is a veto."""

NO_TABLE = -1
"""`Verdict.table_seq` of a step that was judged without an armed table."""


class Action(StrEnum):
    """What a rule can do; the same words in YAML, protobuf, metrics and docs."""

    SKIP_BATCH = "skip_batch"
    SCALE_LR = "scale_lr"
    ROLLBACK = "rollback"
    ALERT = "alert"


class Mode(StrEnum):
    """Whether a rule acts or only writes down what it would have done."""

    OBSERVE = "observe"
    ACT = "act"


class VerdictKind(StrEnum):
    """What happens to the pending update."""

    APPLY = "apply"
    VETO = "veto"


class Outcome(StrEnum):
    """How an intervention ended."""

    PENDING = "pending"
    """Carried out; the loss is still being watched."""
    RECOVERED = "recovered"
    """The loss is back in its band."""
    NOT_RECOVERED = "not_recovered"
    """`recover_within` passed and the loss is still above its band."""
    UNKNOWN = "unknown"
    """`recover_within` passed and there was no loss, or no band, to tell by."""
    REFUSED = "refused"
    """The job would not do it, and touched nothing."""
    FAILED = "failed"
    """The job tried and could not."""
    MISSED = "missed"
    """The rule held, but the table that judged the step did not have it (late, expired, budget)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the armed table said of one pending step, and which rule and table said it."""

    kind: VerdictKind = VerdictKind.APPLY
    rule: str = ""
    """Name of the rule that vetoed; empty when applied."""
    table_seq: int = NO_TABLE
    """`ArmedTable.seq` of the table that was in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The job-wide numbers of one pending step, and what was done with it."""

    seq: int
    """Counts optimizer steps of this epoch from 0; never goes back, also not on a rollback."""
    step: int
    """Optimizer step of the run; goes back on a rollback."""
    values: Mapping[str, float]
    """Signal to value.  An absent signal is missing, never NaN."""
    verdict: Verdict = field(default_factory=Verdict)
    lr_factor: float = 1.0
    """Product of trimtab's own LR factors in this step."""
    batch: int | None = None
    """Data position of the step's batch, where the guard owns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmedRule:
    """One rule folded to a predicate over the pending step."""

    name: str
    predicate: Node
    """Tree of constants, signals and operations; no calls."""
    budget: int
    """Vetoes that this table may still give for the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmedTable:
    """Everything the job needs to judge the next pending step by itself."""

    epoch: int
    seq: int
    """Of the observation it is based on: it judges seq + 1, and later ones with a lag."""
    expires_seq: int
    """The last seq it may judge."""
    lr_factor: float
    """The LR factor it was folded under; under another one, rules on LR-scaled signals are out."""
    budget: int
    """Vetoes that this table may still give in all."""
    rules: tuple[ArmedRule, ...]
    policy_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the engine wants, with the evidence for it.  In mode observe it ends here."""

    id: str
    epoch: int
    seq: int
    step: int
    rule: str
    action: Action
    mode: Mode
    arguments: Mapping[str, float]
    evidence: tuple[str, ...]
    """One line per comparison of the rule: both sides with their values."""
    summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """A decision on its way to the job: to be carried out between two steps, on all ranks."""

    id: str
    epoch: int
    seq: int
    """Of the observation it was decided on."""
    step: int
    """Of the same observation."""
    expires_seq: int
    """The last seq after which it may still be carried out."""
    rule: str
    action: Action
    arguments: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """What the job says it did with a directive."""

    id: str
    epoch: int
    seq: int
    """Of the last observation before it was carried out."""
    step: int
    """The step that comes next; after a rollback, the one that was returned to."""
    outcome: Outcome
    """PENDING (done), REFUSED or FAILED."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """A veto or a directive that was carried out, refused or missed, and how it ended."""

    id: str
    epoch: int
    seq: int
    step: int
    rule: str
    action: Action
    outcome: Outcome
    outcome_seq: int
    """Of the observation at which the outcome was known."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A job process group registered: the first one, or a restart with a higher epoch."""

    epoch: int
    signals: tuple[str, ...]
    """Signals that the job measures; rules that need others are inactive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebaselined:
    """A new level was accepted after `rebaseline` flagged steps in a row."""

    epoch: int
    seq: int
    step: int
    flagged_steps: int


Event = Registered | Observation | Ack
"""What moves the engine."""
Record = Decision | Intervention | Rebaselined
"""What the engine writes down."""
