"""One rule's memory: how often it matched in a row, where its ladder stands, what budget is left.

Called by engine.step once per observation.  `tick` counts observed steps over all epochs.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from trimtab.controller.engine.policy import Rule, Rung


class Phase(StrEnum):
    """Where a rule stands, in Prometheus's words, and two of its own."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    COOLING = "cooling"
    SPENT = "spent"
    """Its ladder is at its end: structural, it stops intervening until the policy changes."""


@dataclass(slots=True, kw_only=True)
class RuleMemory:
    """What a rule remembers from step to step."""

    streak: int = 0
    """Matches in a row, up to now."""
    onset_step: int = 0
    """Step at which the streak began."""
    cooling_until: int = -1
    """Last tick of the cooldown."""
    rung: int = 0
    """Where its ladder stands; one past the last rung: spent."""
    moved: int = -1
    """Tick of its last decision, or of the last move of its ladder."""
    decided: list[int] = field(default_factory=list)
    """Ticks of the decisions on this rung that still count for its limit."""

    def saw(self, rule: Rule, tick: int, step: int, *, matched: bool) -> bool:
        """Take in whether the rule's condition held; return whether its ladder went back."""
        if matched and self.streak == 0:
            self.onset_step = step
        self.streak = self.streak + 1 if matched else 0
        rung = self.at(rule)
        if rung is None:
            return False
        self.decided = [t for t in self.decided if t > tick - rung.limit.window_steps]
        calm = tick - self.moved >= rung.limit.window_steps
        if self.rung == 0 or not calm or self.streak:
            return False
        self._move(0, tick)
        return True

    def at(self, rule: Rule) -> Rung | None:
        """Return the rung on which the rule stands, or None if its ladder is spent."""
        return rule.rungs[self.rung] if self.rung < len(rule.rungs) else None

    def climb(self, tick: int) -> None:
        """Go up one rung; the one past the last is the end."""
        self._move(self.rung + 1, tick)

    def _move(self, rung: int, tick: int) -> None:
        self.rung, self.moved, self.decided = rung, tick, []

    def budget(self, rule: Rule) -> int:
        """Return how many decisions the limit of its rung still allows."""
        rung = self.at(rule)
        return max(0, rung.limit.count - len(self.decided)) if rung else 0

    def due(self, rule: Rule, tick: int) -> bool:
        """Return whether the rule would decide at this tick, having seen it, were there budget."""
        return self.streak >= rule.for_steps and tick > self.cooling_until

    def could_fire(self, rule: Rule, tick: int) -> bool:
        """Return whether one more match, at this coming tick, would make the rule decide."""
        return (
            self.streak + 1 >= rule.for_steps
            and tick > self.cooling_until
            and self.budget(rule) > 0
        )

    def decide(self, rule: Rule, tick: int) -> None:
        """Spend budget and start the cooldown."""
        self.decided.append(tick)
        self.moved = tick
        self.cooling_until = tick + rule.cooldown_steps

    def phase(self, rule: Rule, tick: int) -> Phase:
        """Return where the rule stands after this tick."""
        if self.at(rule) is None:
            return Phase.SPENT
        if tick <= self.cooling_until:
            return Phase.COOLING
        if self.streak == 0:
            return Phase.INACTIVE
        return Phase.FIRING if self.streak >= rule.for_steps else Phase.PENDING
