"""The agent: lives in a training process, measures each pending update and guards it."""

from trimtab.agent.config import GuardConfig
from trimtab.agent.guard import Guard

__all__ = ["Guard", "GuardConfig"]
