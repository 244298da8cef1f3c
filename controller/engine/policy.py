"""A policy as values: rules, their actions and limits.  Made by `controller.loader` from YAML."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trimtab.controller.engine.expression import Node
from trimtab.controller.engine.model import Action, Change, Mode

OUTCOME_WINDOW_STEPS = 64
"""Window of the loss band that tells whether a run has recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most `count` decisions in any `window_steps` optimizer steps."""

    count: int
    window_steps: int

    def __str__(self) -> str:
        """Return it as a policy spells it."""
        return f"{self.count} per {self.window_steps} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCall:
    """An action with its arguments; numbers are worked out at the step of the decision."""

    action: Action
    arguments: Mapping[str, Node] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)
    """How the arguments were spelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What a rule does as long as it stands here; the first is `do`, others are of `ladder`."""

    do: tuple[ActionCall, ...]
    limit: Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of `rules:`."""

    name: str
    when: Node
    text: str
    """How `when` was spelled."""
    rungs: tuple[Rung, ...]
    for_steps: int
    """Matches in a row before it acts; 1: at once."""
    after_steps: int
    """First optimizer step of the run at which it is active."""
    cooldown_steps: int
    """Steps after a decision in which it makes no other."""
    recover_within_steps: int
    mode: Mode
    hold_off: Mapping[Change, int]
    """Change to the steps from it on in which the rule does not match."""
    labels: Mapping[str, str]
    """Words for people and alerts; rules with the same `cause` share that cause's budget."""
    layers: tuple[str, ...]
    """Patterns of the layer groups that it looks at; none: all."""
    summary: str

    @property
    def cause(self) -> str:
        """The cause whose budget it shares, or an empty text."""
        return self.labels.get("cause", "")

    @property
    def acts(self) -> bool:
        """Whether it touches the run: alerts alone do not."""
        calls = (call for rung in self.rungs for call in rung.do)
        return self.mode is Mode.ACT and any(call.action is not Action.ALERT for call in calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A file of rules, in order of precedence."""

    version: str
    """First 12 hex digits of the SHA-256 of the text."""
    text: str
    name: str
    """File name, for messages."""
    summary: str
    """What it is for."""
    sources: tuple[str, ...]
    """Where its numbers come from."""
    rules: tuple[Rule, ...]
    expires_steps: int
    """How many steps a table may judge when no newer one comes."""
    rebaseline_steps: int
    """Flagged values in a row after which a new level is accepted; bounds vetoes in a row."""
    rearm_on: frozenset[Change]
    """Changes that make the past start anew."""
    run_limit: Limit
    """Of the acting decisions of all rules together."""
    cause_limits: Mapping[str, Limit]
    own_signals: Mapping[str, str]
    """User-defined signals and what they mean."""

    def calls(self) -> Iterator[tuple[Rule, int, ActionCall]]:
        """Yield every action with its rule and rung."""
        for rule in self.rules:
            for rung, content in enumerate(rule.rungs):
                for call in content.do:
                    yield rule, rung, call
