from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("protocol_version", "run", "session", "world_size", "signals", "optimizer", "agent_version", "layer_groups", "layer_signals")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAYER_SIGNALS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run: str
    session: str
    world_size: int
    signals: _containers.RepeatedScalarFieldContainer[str]
    optimizer: str
    agent_version: str
    layer_groups: _containers.RepeatedScalarFieldContainer[str]
    layer_signals: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., run: _Optional[str] = ..., session: _Optional[str] = ..., world_size: _Optional[int] = ..., signals: _Optional[_Iterable[str]] = ..., optimizer: _Optional[str] = ..., agent_version: _Optional[str] = ..., layer_groups: _Optional[_Iterable[str]] = ..., layer_signals: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("epoch", "address", "policy_version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    address: str
    policy_version: str
    def __init__(self, epoch: _Optional[int] = ..., address: _Optional[str] = ..., policy_version: _Optional[str] = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("hello", "observation", "ack")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    observation: Observation
    ack: Ack
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., observation: _Optional[_Union[Observation, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("run", "epoch")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch: int
    def __init__(self, run: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("seq", "step", "values", "absent", "verdict", "lr_factor", "batch", "layer_values", "declared", "ratio_sketch")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    LR_FACTOR_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_VALUES_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    RATIO_SKETCH_FIELD_NUMBER: _ClassVar[int]
    seq: int
    step: int
    values: _containers.RepeatedScalarFieldContainer[float]
    absent: _containers.RepeatedScalarFieldContainer[int]
    verdict: Verdict
    lr_factor: float
    batch: int
    layer_values: _containers.RepeatedScalarFieldContainer[float]
    declared: _containers.RepeatedScalarFieldContainer[str]
    ratio_sketch: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[int] = ..., step: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ..., absent: _Optional[_Iterable[int]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., lr_factor: _Optional[float] = ..., batch: _Optional[int] = ..., layer_values: _Optional[_Iterable[float]] = ..., declared: _Optional[_Iterable[str]] = ..., ratio_sketch: _Optional[_Iterable[int]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("kind", "rule", "table_seq", "scale")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        APPLY: _ClassVar[Verdict.Kind]
        VETO: _ClassVar[Verdict.Kind]
        SCALE: _ClassVar[Verdict.Kind]
    APPLY: Verdict.Kind
    VETO: Verdict.Kind
    SCALE: Verdict.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TABLE_SEQ_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    kind: Verdict.Kind
    rule: str
    table_seq: int
    scale: float
    def __init__(self, kind: _Optional[_Union[Verdict.Kind, str]] = ..., rule: _Optional[str] = ..., table_seq: _Optional[int] = ..., scale: _Optional[float] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("verdict", "directive")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    directive: Directive
    def __init__(self, verdict: _Optional[_Union[Verdict, _Mapping]] = ..., directive: _Optional[_Union[Directive, _Mapping]] = ...) -> None: ...

class ControllerMessage(_message.Message):
    __slots__ = ("table", "directive")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    table: Table
    directive: Directive
    def __init__(self, table: _Optional[_Union[Table, _Mapping]] = ..., directive: _Optional[_Union[Directive, _Mapping]] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("epoch", "seq", "expires_seq", "lr_factor", "budget", "policy_version", "durable_seq", "residuals", "armed", "terms", "term_sizes", "cause_budgets")
    class CauseBudgetsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_SEQ_FIELD_NUMBER: _ClassVar[int]
    LR_FACTOR_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQ_FIELD_NUMBER: _ClassVar[int]
    RESIDUALS_FIELD_NUMBER: _ClassVar[int]
    ARMED_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    TERM_SIZES_FIELD_NUMBER: _ClassVar[int]
    CAUSE_BUDGETS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    expires_seq: int
    lr_factor: float
    budget: int
    policy_version: str
    durable_seq: int
    residuals: _containers.RepeatedCompositeFieldContainer[Residual]
    armed: _containers.RepeatedCompositeFieldContainer[Armed]
    terms: _containers.RepeatedScalarFieldContainer[float]
    term_sizes: _containers.RepeatedScalarFieldContainer[int]
    cause_budgets: _containers.ScalarMap[str, int]
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., expires_seq: _Optional[int] = ..., lr_factor: _Optional[float] = ..., budget: _Optional[int] = ..., policy_version: _Optional[str] = ..., durable_seq: _Optional[int] = ..., residuals: _Optional[_Iterable[_Union[Residual, _Mapping]]] = ..., armed: _Optional[_Iterable[_Union[Armed, _Mapping]]] = ..., terms: _Optional[_Iterable[float]] = ..., term_sizes: _Optional[_Iterable[int]] = ..., cause_budgets: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Residual(_message.Message):
    __slots__ = ("rule", "predicate", "clip_to", "cause", "paused_by", "fresh")
    RULE_FIELD_NUMBER: _ClassVar[int]
    PREDICATE_FIELD_NUMBER: _ClassVar[int]
    CLIP_TO_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    rule: str
    predicate: Node
    clip_to: Node
    cause: str
    paused_by: _containers.RepeatedScalarFieldContainer[str]
    fresh: bool
    def __init__(self, rule: _Optional[str] = ..., predicate: _Optional[_Union[Node, _Mapping]] = ..., clip_to: _Optional[_Union[Node, _Mapping]] = ..., cause: _Optional[str] = ..., paused_by: _Optional[_Iterable[str]] = ..., fresh: bool = ...) -> None: ...

class Armed(_message.Message):
    __slots__ = ("residual", "budget")
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    residual: int
    budget: int
    def __init__(self, residual: _Optional[int] = ..., budget: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("constant", "signal", "operation", "each_signal", "term", "each_term")
    CONSTANT_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    EACH_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    EACH_TERM_FIELD_NUMBER: _ClassVar[int]
    constant: float
    signal: str
    operation: Operation
    each_signal: str
    term: int
    each_term: int
    def __init__(self, constant: _Optional[float] = ..., signal: _Optional[str] = ..., operation: _Optional[_Union[Operation, _Mapping]] = ..., each_signal: _Optional[str] = ..., term: _Optional[int] = ..., each_term: _Optional[int] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("operator", "operands")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    OPERANDS_FIELD_NUMBER: _ClassVar[int]
    operator: str
    operands: _containers.RepeatedCompositeFieldContainer[Node]
    def __init__(self, operator: _Optional[str] = ..., operands: _Optional[_Iterable[_Union[Node, _Mapping]]] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("id", "epoch", "seq", "expires_seq", "rule", "action", "arguments", "step", "options")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_SEQ_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    id: str
    epoch: int
    seq: int
    expires_seq: int
    rule: str
    action: str
    arguments: _containers.ScalarMap[str, float]
    step: int
    options: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., expires_seq: _Optional[int] = ..., rule: _Optional[str] = ..., action: _Optional[str] = ..., arguments: _Optional[_Mapping[str, float]] = ..., step: _Optional[int] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("id", "epoch", "seq", "step", "outcome", "detail")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    id: str
    epoch: int
    seq: int
    step: int
    outcome: str
    detail: str
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., step: _Optional[int] = ..., outcome: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class RankSample(_message.Message):
    __slots__ = ("seq", "step", "loss", "step_time_s", "memory_bytes", "nonfinite", "batch_ids", "dataset")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    BATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    seq: int
    step: int
    loss: float
    step_time_s: float
    memory_bytes: int
    nonfinite: bool
    batch_ids: _containers.RepeatedScalarFieldContainer[str]
    dataset: str
    def __init__(self, seq: _Optional[int] = ..., step: _Optional[int] = ..., loss: _Optional[float] = ..., step_time_s: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., nonfinite: bool = ..., batch_ids: _Optional[_Iterable[str]] = ..., dataset: _Optional[str] = ...) -> None: ...

class RankSamples(_message.Message):
    __slots__ = ("run", "epoch", "rank", "samples")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch: int
    rank: int
    samples: _containers.RepeatedCompositeFieldContainer[RankSample]
    def __init__(self, run: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[RankSample, _Mapping]]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRankSamplesRequest(_message.Message):
    __slots__ = ("run", "first_step", "last_step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    first_step: int
    last_step: int
    def __init__(self, run: _Optional[str] = ..., first_step: _Optional[int] = ..., last_step: _Optional[int] = ...) -> None: ...

class ListRankSamplesResponse(_message.Message):
    __slots__ = ("rows",)
    class Row(_message.Message):
        __slots__ = ("epoch", "rank", "sample")
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        SAMPLE_FIELD_NUMBER: _ClassVar[int]
        epoch: int
        rank: int
        sample: RankSample
        def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., sample: _Optional[_Union[RankSample, _Mapping]] = ...) -> None: ...
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[ListRankSamplesResponse.Row]
    def __init__(self, rows: _Optional[_Iterable[_Union[ListRankSamplesResponse.Row, _Mapping]]] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run", "epoch", "step", "values", "interventions", "policy_version", "last_observation_timestamp_s", "connected")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    INTERVENTIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_OBSERVATION_TIMESTAMP_S_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch: int
    step: int
    values: _containers.ScalarMap[str, float]
    interventions: int
    policy_version: str
    last_observation_timestamp_s: float
    connected: bool
    def __init__(self, run: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ..., interventions: _Optional[int] = ..., policy_version: _Optional[str] = ..., last_observation_timestamp_s: _Optional[float] = ..., connected: bool = ...) -> None: ...

class ListInterventionsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListInterventionsResponse(_message.Message):
    __slots__ = ("interventions",)
    INTERVENTIONS_FIELD_NUMBER: _ClassVar[int]
    interventions: _containers.RepeatedCompositeFieldContainer[Intervention]
    def __init__(self, interventions: _Optional[_Iterable[_Union[Intervention, _Mapping]]] = ...) -> None: ...

class Intervention(_message.Message):
    __slots__ = ("run", "id", "epoch", "step", "rule", "action", "outcome", "detail", "evidence", "arguments", "options", "layers", "close")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    run: str
    id: str
    epoch: int
    step: int
    rule: str
    action: str
    outcome: str
    detail: str
    evidence: _containers.RepeatedScalarFieldContainer[str]
    arguments: _containers.ScalarMap[str, float]
    options: _containers.ScalarMap[str, str]
    layers: _containers.RepeatedScalarFieldContainer[str]
    close: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., id: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., rule: _Optional[str] = ..., action: _Optional[str] = ..., outcome: _Optional[str] = ..., detail: _Optional[str] = ..., evidence: _Optional[_Iterable[str]] = ..., arguments: _Optional[_Mapping[str, float]] = ..., options: _Optional[_Mapping[str, str]] = ..., layers: _Optional[_Iterable[str]] = ..., close: _Optional[_Iterable[str]] = ...) -> None: ...
