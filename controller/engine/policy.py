"""A policy as values: rules, their actions and limits.  Made by `controller.loader` from YAML."""

from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.controller.engine.expression import Node, calls, signals
from trimtab.controller.engine.model import Action, Mode

OUTCOME_WINDOW_STEPS = 64
"""Window of the loss band that tells whether a run has recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most `count` decisions of a rule in any `window_steps` optimizer steps."""

    count: int
    window_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCall:
    """An action with its arguments; they are worked out at the step of the decision."""

    action: Action
    arguments: Mapping[str, Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of `rules:`."""

    name: str
    when: Node
    do: tuple[ActionCall, ...]
    for_steps: int
    """Matches in a row before it acts; 1: at once."""
    after_steps: int
    """First optimizer step of the run at which it is active."""
    cooldown_steps: int
    """Steps after a decision in which it makes no other."""
    limit: Limit
    recover_within_steps: int
    mode: Mode
    summary: str

    @property
    def armed(self) -> bool:
        """Whether the job judges it by itself: it acts, and can act on the pending step."""
        return self.mode is Mode.ACT and any(c.action is Action.SKIP_BATCH for c in self.do)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A file of rules, in order of precedence."""

    version: str
    """First 12 hex digits of the SHA-256 of the text."""
    text: str
    name: str
    """File name, for messages."""
    rules: tuple[Rule, ...]
    expires_steps: int
    """How many steps a table may judge when no newer one comes."""
    rebaseline_steps: int
    """Flagged steps in a row after which the new level is accepted; bounds vetoes in a row."""

    def windows(self) -> dict[str, frozenset[int]]:
        """Return the window sizes that the rules need of each signal."""
        sizes: dict[str, set[int]] = {"loss": {OUTCOME_WINDOW_STEPS}}
        for node in self._nodes():
            for call in calls(node):
                sizes.setdefault(call.signal, set()).add(call.window_steps)
        return {signal: frozenset(found) for signal, found in sizes.items()}

    def missing(self, rule: Rule, measured: frozenset[str]) -> frozenset[str]:
        """Return the signals that a rule needs and the job does not measure."""
        nodes = [rule.when, *(n for call in rule.do for n in call.arguments.values())]
        return frozenset().union(*(signals(node) for node in nodes)) - measured

    def _nodes(self) -> list[Node]:
        return [
            node
            for rule in self.rules
            for node in (
                rule.when,
                *(n for call in rule.do for n in call.arguments.values()),
            )
        ]
