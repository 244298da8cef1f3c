"""One rule's memory: how often it matched in a row, whether it is cooling, what budget is left.

Called by engine.step once per observation.  `tick` counts observed steps over all epochs.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from trimtab.controller.engine.policy import Rule


class Phase(StrEnum):
    """Where a rule stands, in Prometheus's words."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    COOLING = "cooling"


@dataclass(slots=True, kw_only=True)
class RuleMemory:
    """What a rule remembers from step to step."""

    streak: int = 0
    """Matches in a row, up to now."""
    onset_step: int = 0
    """Step at which the streak began."""
    cooling_until: int = -1
    """Last tick of the cooldown."""
    decided: list[int] = field(default_factory=list)
    """Ticks of the decisions that still count for the limit."""

    def saw(self, rule: Rule, tick: int, step: int, *, matched: bool) -> None:
        """Take in whether the rule's condition held at this tick."""
        if matched and self.streak == 0:
            self.onset_step = step
        self.streak = self.streak + 1 if matched else 0
        self.decided = [t for t in self.decided if t > tick - rule.limit.window_steps]

    def budget(self, rule: Rule) -> int:
        """Return how many decisions the limit still allows."""
        return max(0, rule.limit.count - len(self.decided))

    def fires(self, rule: Rule, tick: int) -> bool:
        """Return whether the rule decides at this tick, having seen it."""
        return self.streak >= rule.for_steps and tick > self.cooling_until and self.budget(rule) > 0

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
        self.cooling_until = tick + rule.cooldown_steps

    def phase(self, rule: Rule, tick: int) -> Phase:
        """Return where the rule stands after this tick."""
        if tick <= self.cooling_until:
            return Phase.COOLING
        if self.streak == 0:
            return Phase.INACTIVE
        return Phase.FIRING if self.streak >= rule.for_steps else Phase.PENDING
