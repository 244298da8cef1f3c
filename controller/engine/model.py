"""The values that flow through trimtab: observation in, armed table, decision and directive out.

Shared by agent and controller; `protos.wire` translates them to and from protobuf.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from trimtab.controller.engine.episode import Episode
from trimtab.controller.engine.expression import (
    Evaluate,
    Node,
    Value,
    Vector,
    compiled,
    pending,
)
from trimtab.controller.engine.signals import SCALED_BY_LR

REFLEX = "reflex"
"""Name of the built-in rule: a non-finite value anywhere in the pending step is a veto."""

NO_TABLE = -1
"""`Verdict.table_seq` of a step that was judged without an armed table."""


class Action(StrEnum):
    """What a rule can do; the same words in YAML, protobuf, metrics and docs."""

    SKIP_BATCH = "skip_batch"
    CLIP_UPDATE = "clip_update"
    SCALE_LR = "scale_lr"
    SET_BETAS = "set_betas"
    SET_EPS = "set_eps"
    ADD_GRADIENT_NOISE = "add_gradient_noise"
    RESET_MOMENTS = "reset_moments"
    ROLLBACK = "rollback"
    CHECKPOINT = "checkpoint"
    PAUSE = "pause"
    HALT = "halt"
    CALL = "call"
    """A function that the job registered by name."""
    ALERT = "alert"


ARMED_ACTIONS = frozenset({Action.SKIP_BATCH, Action.CLIP_UPDATE})
"""What the job does by itself, on the very step, by its armed table."""

LR_FACTOR_FLOOR = 0.01
"""Least product of all LR factors: below it a run stands still and looks healthy."""


class Mode(StrEnum):
    """Whether a rule acts or only writes down what it would have done."""

    OBSERVE = "observe"
    ACT = "act"


class Change(StrEnum):
    """What the job declares, or the engine sees for itself, so that it is not taken for a spike."""

    LR_SCHEDULE = "lr_schedule"
    BATCH_SIZE = "batch_size"
    DATA_MIX = "data_mix"
    RESUME = "resume"
    """The job restarted, or its step number went back."""
    INTERVENTION = "intervention"
    """One of trimtab's own was carried out."""


DECLARED = (Change.LR_SCHEDULE, Change.BATCH_SIZE, Change.DATA_MIX)
"""Changes that only the job can know of."""


class VerdictKind(StrEnum):
    """What happens to the pending update."""

    APPLY = "apply"
    VETO = "veto"
    SCALE = "scale"


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
class Layout:
    """What a job measures, fixed when it registers: the layout of its observations."""

    signals: tuple[str, ...]
    """Job-wide signals; rules that need others are inactive."""
    layer_groups: tuple[str, ...] = ()
    """Names of the layer groups, from the input to the output."""
    layer_signals: tuple[str, ...] = ()
    """Signals that are measured per layer group too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the armed table said of one pending step, and which rule and table said it."""

    kind: VerdictKind = VerdictKind.APPLY
    rule: str = ""
    """Name of the rule that vetoed or scaled; empty when applied."""
    scale: float = 1.0
    """What the update is multiplied with, in (0, 1); of a verdict SCALE."""
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
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    """Signal to one value per layer group, in the registered order; NaN where it is absent."""
    lr_factor: float = 1.0
    """Product of trimtab's own LR factors in this step."""
    declared: tuple[Change, ...] = ()
    """What the job declared since the step before."""
    batch: int | None = None
    """Data position of the step's batch, where the guard owns it."""
    ratio_sketch: tuple[int, ...] = ()
    """Elements per bin of m/sqrt(v), all bins of the first layer group, then of the second, ...;
    empty: not sketched in this step.  `sketch.with_dips` turns it into ratio_dip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """What only one rank knows of a step.  Not part of an observation: no rule speaks of it."""

    seq: int
    step: int
    loss: float | None
    """Of the rank's own batch; None: not told."""
    step_time_s: float
    memory_bytes: int
    """Most that the process held so far: on its device, or resident without one."""
    nonfinite: bool
    """Whether this rank's part of the gradient has a NaN or an infinity."""
    batch_ids: tuple[str, ...] = ()
    dataset: str = ""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """What is left of a rule in the pending step; fixed as long as the policy is."""

    rule: str
    predicate: Node
    """Over constants, terms and signals of the pending step."""
    clip_to: Node | None = None
    """Largest update_norm that is let through; None: the step is vetoed."""
    cause: str = ""
    """Whose budget it shares with other rules."""
    paused_by: tuple[Change, ...] = ()
    """Declared changes on whose step it must not judge."""
    fresh: bool = False
    """Whether only a table of the step before may judge by it: it counts steps in a row."""

    @cached_property
    def holds(self) -> Evaluate:
        """Whether the predicate holds, compiled."""
        return compiled(self.predicate)

    @cached_property
    def allowed(self) -> Evaluate | None:
        """The largest update_norm, compiled."""
        return None if self.clip_to is None else compiled(self.clip_to)

    @cached_property
    def scaled_by_lr(self) -> bool:
        """Whether it compares a signal that is proportional to the LR."""
        return any(signal.name in SCALED_BY_LR for signal in pending(self.predicate))


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """A residual that is in force."""

    residual: int
    """Its place in `ArmedTable.residuals`."""
    budget: int
    """Verdicts other than apply that it may still give after the table's step."""


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
    policy_version: str
    residuals: tuple[Residual, ...]
    """Of the policy, in order of precedence."""
    terms: tuple[Value | None, ...]
    """Values of the parts of the residuals that depend on the past alone; None: not known."""
    armed: tuple[Armed, ...]
    """In order of precedence."""
    budget: int
    """Verdicts other than apply that all rules together may still give after the table's step."""
    cause_budgets: Mapping[str, int] = field(default_factory=dict)
    """The same for all rules of a cause."""


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
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the action that are words."""
    layers: tuple[str, ...] = ()
    """Layer groups (or datasets) that matched."""
    close: tuple[str, ...] = ()
    """Other rules that nearly matched, with how near."""
    rung: int = 0
    """Rung of the ladder; 0 is `do`."""
    labels: Mapping[str, str] = field(default_factory=dict)
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
    options: Mapping[str, str] = field(default_factory=dict)


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
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebaselined:
    """A new level of a signal was accepted after `rebaseline` flagged values in a row."""

    epoch: int
    seq: int
    step: int
    signal: str
    """With the layer group behind it, as in update_norm[blocks.0], where there is one."""
    flagged_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    """A rule's ladder moved: to the next rung, back to `do`, or past its end."""

    epoch: int
    seq: int
    step: int
    rule: str
    rung: int
    """Where it stands now; one past the last: structural, the rule stops intervening."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """An instability that has ended, graded from the observations."""

    epoch: int
    seq: int
    episode: Episode


Event = Registered | Observation | Ack
"""What moves the engine."""
Record = Decision | Intervention | Rebaselined | Climbed | Graded
"""What the engine writes down."""
