"""A controller in the same process: the real engine behind the channel's interface."""

from collections import deque

from trimtab.controller.engine.model import (
    Ack,
    ArmedTable,
    Directive,
    Layout,
    Observation,
    Record,
    Registered,
)
from trimtab.controller.engine.sketch import with_dips
from trimtab.controller.engine.state import State
from trimtab.controller.engine.step import step
from trimtab.controller.loader import parse_policy


class LoopbackController:
    """Answers every observation at once."""

    def __init__(self, policy: str, layout: Layout) -> None:
        self.state = State(parse_policy(policy, "test.yaml"))
        registered = Registered(epoch=0, layout=layout)
        self.table: ArmedTable | None = step(self.state, registered).table
        self.directives: deque[Directive] = deque()
        self.observations: list[Observation] = []
        self.acks: list[Ack] = []
        self.records: list[Record] = []

    def send(self, message: Observation | Ack) -> None:
        """Take a message through the engine."""
        (self.acks if isinstance(message, Ack) else self.observations).append(message)  # type: ignore[arg-type]
        if isinstance(message, Observation):
            message = with_dips(message, self.state.layout)
        outputs = step(self.state, message)
        self.records += outputs.records
        self.table = outputs.table or self.table
        self.directives.extend(outputs.directives)

    def close(self) -> None:
        """Nothing is open."""
