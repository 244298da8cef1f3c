"""Settings of a Guard: arguments first, then TRIMTAB_* variables, then the defaults here."""

import os
import socket
from dataclasses import dataclass, field


def _variable(name: str, default: str | None = None) -> str | None:
    return os.environ.get(name) or default


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    # A typo in a variable must not stop a training; the default is the safe choice.
    return int(text) if text.isdecimal() else default


def _share(name: str, default: float) -> float:
    try:
        value = float(os.environ.get(name, ""))
    except ValueError:
        return default
    return value if 0.0 < value <= 1.0 else default


def _run_name() -> str:
    name = _variable("TRIMTAB_RUN") or _variable("TORCHELASTIC_RUN_ID")
    return name if name and name != "none" else f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """How one Guard works."""

    address: str | None = field(default_factory=lambda: _variable("TRIMTAB_ADDRESS"))
    """host:port of the controller's gateway (TRIMTAB_ADDRESS).  None: `policy` is evaluated in the
    job itself; without one too, the reflex alone guards."""

    policy: str | None = field(default_factory=lambda: _variable("TRIMTAB_POLICY"))
    """Policy file for a job without a controller (TRIMTAB_POLICY), or the name of a shipped one:
    "default", "observe-only", ..."""

    store: str | None = field(default_factory=lambda: _variable("TRIMTAB_STORE"))
    """SQLAlchemy URL of such a job's journal (TRIMTAB_STORE); by default trimtab.db in the current
    folder."""

    mode: str = field(default_factory=lambda: _variable("TRIMTAB_MODE", "act") or "act")
    """ "act", or "observe": everything is judged and recorded, nothing is done (TRIMTAB_MODE)."""

    run: str = field(default_factory=_run_name)
    """Id of the run (TRIMTAB_RUN, else torchrun's run id, else host and process)."""

    restore_every_steps: int = field(
        default_factory=lambda: _number("TRIMTAB_RESTORE_EVERY_STEPS", 50)
    )
    """Steps between two in-memory restore points (TRIMTAB_RESTORE_EVERY_STEPS); 0: none."""

    restore_budget_bytes: int = field(
        default_factory=lambda: _number("TRIMTAB_RESTORE_BUDGET_BYTES", 1 << 30)
    )
    """Host memory per rank for restore points (TRIMTAB_RESTORE_BUDGET_BYTES), 1 GiB; 0: none."""

    rank_samples: bool = field(default_factory=lambda: _number("TRIMTAB_RANK_SAMPLES", 1) != 0)
    """Whether every rank tells the controller its own loss, batches, time and memory of each step
    (TRIMTAB_RANK_SAMPLES; 0: no)."""

    sketch_every_steps: int = field(
        default_factory=lambda: _number("TRIMTAB_SKETCH_EVERY_STEPS", 10)
    )
    """Steps between two measurements of what is costly (TRIMTAB_SKETCH_EVERY_STEPS): the sketch of
    m/sqrt(v) and its dip, parameter norms, dead neurons."""

    activations: bool = field(default_factory=lambda: _number("TRIMTAB_ACTIVATIONS", 0) != 0)
    """Whether forward hooks measure activations in those steps too (TRIMTAB_ACTIVATIONS=1)."""

    overhead_budget: float = field(default_factory=lambda: _share("TRIMTAB_OVERHEAD_BUDGET", 0.02))
    """Share of a step's time from which on they are measured more rarely
    (TRIMTAB_OVERHEAD_BUDGET)."""

    compile: str = field(default_factory=lambda: _variable("TRIMTAB_COMPILE", "auto") or "auto")
    """Whether the probe is compiled (TRIMTAB_COMPILE): "always", "never", or "auto": where a rank
    holds so many elements that the seconds it takes, once, pay."""
