"""What each instability of a run was, graded afterwards from the observations alone.

One Grader per run is fed every observed step in order.  Height grades nothing: a fatal spike was
3 % high (Marin 32B), a harmless one 130 % (BLOOM 176B).  Recovery and the level at the end do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import isfinite
from typing import Any, Final, Self

from trimtab.controller.engine.excursion import (
    LEAD_RATIO,
    LEVEL_STEPS,
    LOSS_RATIO,
    MUTED,
    QUIET_STEPS,
    Lead,
    Level,
    Spot,
    Trouble,
    middle,
)

LEAD_SIGNALS: Final = ("grad_norm", "update_norm", "exp_avg_norm", "loss_scale")
"""Signals that move before the loss: grad norm by 4 steps (BLOOM), loss scale by 30 (GLM-130B)."""
FAST_STEPS: Final = 50
"""A recovery within so many observed steps is fast: BLOOM 176B took 30, the 13B before it 500."""
GIVE_UP_STEPS: Final = 500
"""Observed steps after which a level that was not regained is the new one."""
MAX_DATASETS: Final = 32
"""How many names of dataset_loss[NAME] are followed; later ones are not."""

_LEAD_GAP = 5
_OUTLIERS = 2
_DATASET = "dataset_loss["
_VERSION = 1


class EpisodeKind(StrEnum):
    """How an episode went, mildest first."""

    PRECURSOR = "precursor"
    """A lead signal left its band; the loss never did."""
    DATA_OUTLIER = "data_outlier"
    """One or two isolated high losses and no lead signal: a hard batch on a healthy model."""
    FAST_RECOVERY = "fast_recovery"
    SLOW_RECOVERY = "slow_recovery"
    PARTIAL_RECOVERY = "partial_recovery"
    """Came down from the peak and settled above the level before."""
    DIVERGED = "diverged"
    """Did not come down, or went on rising; also without a spike."""
    NON_FINITE = "non_finite"
    """The loss or a lead signal was NaN or Inf, whatever else happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One instability, from the first step outside to the last."""

    kind: EpisodeKind
    onset_step: int
    """Where the loss left its band or a value was not finite; of a precursor, the first sign."""
    peak_step: int
    """The step of `peak`; `onset_step` where there is none."""
    end_step: int
    """The last step outside; below `onset_step` where the job went back."""
    peak: float | None
    """The highest finite loss inside; as the levels, of a dataset if the loss itself stayed in."""
    level_before: float | None
    level_after: float | None
    steps_lost: int
    """Observed steps from onset to end, vetoed and repeated ones included."""
    leads: Mapping[str, int]
    """Observed steps by which a signal left its band before the onset; negative: after it.

    Signals that never left are missing.  Of a precursor: steps after the earliest signal.
    """
    datasets: tuple[str, ...]
    """Names of the dataset losses that left their own band, sorted."""


def _plain(state: Any) -> dict[str, Any]:
    return {each.name: getattr(state, each.name) for each in fields(state) if each.init}


def _spot(pair: Sequence[int]) -> Spot:
    return pair[0], pair[1]


@dataclass(slots=True)
class _Open:
    """An episode that has not ended.  Without an onset it is a precursor so far."""

    found: int
    first: Spot
    level: float | None
    onset: Spot | None = None
    lead_end: Spot | None = None
    peak: tuple[float, int] | None = None
    leads: dict[str, int] = field(default_factory=dict)
    runs: dict[str, Spot] = field(default_factory=dict)
    """First and last observed step of each lead signal's latest run outside."""
    astray: list[str] = field(default_factory=list)
    """Lead signals whose last value was outside."""
    nans: dict[str, Spot] = field(default_factory=dict)
    """Where each signal was last not finite."""
    troubles: dict[str, Trouble] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first = _spot(self.first)
        self.onset = _spot(self.onset) if self.onset else None
        self.lead_end = _spot(self.lead_end) if self.lead_end else None
        self.nans = {name: _spot(spot) for name, spot in self.nans.items()}

    def led(self, name: str, index: int) -> None:
        """A lead signal is outside."""
        start, last = self.runs.get(name, (index, index))
        self.runs[name] = (start if index - last <= _LEAD_GAP else index, index)
        self.leads.setdefault(name, index)

    def begin(self, onset: Spot, found: int) -> None:
        """The loss is out.  A lead signal that had come back long before did not lead."""
        self.onset, self.peak, self.found = onset, None, found
        runs = self.runs.items()
        self.leads = {name: start for name, (start, last) in runs if onset[0] - last <= _LEAD_GAP}

    def over(self, index: int) -> bool:
        """Whether it ended with this step; a loss that stays NaN never does."""
        late = index - self.found >= GIVE_UP_STEPS
        if self.onset is None:
            return late or index - (self.lead_end or self.first)[0] >= QUIET_STEPS
        fresh = [name for name, spot in self.nans.items() if index - spot[0] < QUIET_STEPS]
        if not fresh and all(trouble.regained() for trouble in self.troubles.values()):
            return True
        return late and "loss" not in fresh

    def graded(self, here: Spot, level: float | None) -> Episode:
        """The episode if it ended here; `level` is the present one of the loss."""
        onset, troubles = self.onset or self.first, self.troubles
        ends = [trouble.end if trouble.back() else here for trouble in troubles.values()]
        ends += self.nans.values()
        end = max(ends, default=self.lead_end or onset)
        steps = end[0] - onset[0] + 1
        peak, before, after = self.peak, self.level, level
        if troubles:
            main = troubles["loss" if "loss" in troubles else min(troubles)]
            before, after = main.level, middle(main.ring) if main.ring else None
            peak = None if main.peak is None else (main.peak, main.peak_step)
        sign = 1 if self.onset else -1
        return Episode(
            kind=self._kind(steps),
            onset_step=onset[1],
            peak_step=peak[1] if peak else onset[1],
            end_step=end[1],
            peak=peak[0] if peak else None,
            level_before=before,
            level_after=after,
            steps_lost=steps,
            leads={name: sign * (onset[0] - index) for name, index in self.leads.items()},
            datasets=tuple(sorted(name[len(_DATASET) : -1] for name in troubles if name != "loss")),
        )

    def _kind(self, steps: int) -> EpisodeKind:
        if self.onset is None:
            return EpisodeKind.PRECURSOR
        if self.nans:
            return EpisodeKind.NON_FINITE
        lost = [trouble for trouble in self.troubles.values() if not trouble.back()]
        if lost:
            settled = all(trouble.settled() for trouble in lost)
            return EpisodeKind.PARTIAL_RECOVERY if settled else EpisodeKind.DIVERGED
        if not self.leads and all(each.outs <= _OUTLIERS for each in self.troubles.values()):
            return EpisodeKind.DATA_OUTLIER
        return EpisodeKind.FAST_RECOVERY if steps <= FAST_STEPS else EpisodeKind.SLOW_RECOVERY


class Grader:
    """Grades one run.  Memory is bounded; nothing raises, whatever the values are."""

    def __init__(self) -> None:
        self._here: Spot = (0, 0)
        self._after = 0
        self._leads: dict[str, Lead] = {}
        self._levels: dict[str, Level] = {}
        self._open: _Open | None = None

    def saw(
        self,
        step: int,
        values: Mapping[str, float],
        *,
        vetoed: bool = False,
        declared: bool = False,
    ) -> list[Episode]:
        """Take in one observed step; return the episodes that are over.

        A missing signal means nothing.  A step that goes back is one more step.

        Args:
            step: the job's number of the step.
            values: signals by name; loss, dataset_loss[NAME] and LEAD_SIGNALS are read.
            vetoed: the update was not applied; the values are judged and enter no past.
            declared: the job told of a change with this step; what is open ends, graded by what
                is known, and every level is taken anew.
        """
        ended = self.finish() if declared else []
        if declared:
            self._leads, self._levels = {}, {}
        self._here = (self._here[0] + 1, step)
        losses, (leads, broken) = self._losses(values), self._signs(values)
        signs = {name: self._leads[name].left(value) for name, value in leads.items()}
        risen = [name for name, value in losses.items() if self._levels[name].left(value)]
        if self._open or broken or risen or any(signs.values()):
            self._follow(losses, signs, broken, risen)
        if not vetoed and (self._open is None or self._open.onset is None):
            self._learn(losses, {name: leads[name] for name in leads if not signs[name]})
        return ended + (self.finish() if self._open and self._open.over(self._here[0]) else [])

    def finish(self) -> list[Episode]:
        """End what is open, graded by what is known; a step after it is judged as ever."""
        ended, self._open, self._after = self._open, None, self._here[0]
        if ended is None:
            return []
        episode = ended.graded(self._here, self._level())
        for name, trouble in ended.troubles.items():
            if trouble.back():
                self._levels[name].regain()
            else:
                values = [value for *_, value in trouble.ring]
                self._levels[name].restart(values, unsettled=not trouble.settled())
        for name in ended.astray:
            self._leads[name].forget()
        for name, spot in ended.nans.items():
            if name in self._leads and self._here[0] - spot[0] < QUIET_STEPS:
                self._leads[name].ignored = QUIET_STEPS
        return [episode]

    def _losses(self, values: Mapping[str, float]) -> dict[str, float]:
        """The finite losses; a dataset without a sample in this step is often NaN."""
        found = {}
        for name, value in values.items():
            if (name == "loss" or name.startswith(_DATASET)) and isfinite(value):
                if name not in self._levels:
                    if name != "loss" and len(self._levels) >= MAX_DATASETS:
                        continue
                    self._levels[name] = Level(LOSS_RATIO)
                found[name] = value
        return found

    def _signs(self, values: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """The finite lead signals, and the signals that are not finite."""
        leads = {}
        broken = [] if isfinite(values.get("loss", 0.0)) else ["loss"]
        for name in LEAD_SIGNALS:
            if (value := values.get(name)) is None:
                continue
            if name not in self._leads:
                self._leads[name] = Lead(LEAD_RATIO, falls=name == "loss_scale")
            if self._leads[name].broken(value):
                broken.append(name)
            elif isfinite(value):
                leads[name] = value
        return leads, broken

    def _level(self) -> float | None:
        loss = self._levels.get("loss")
        return loss.level() if loss and loss.ranked else None

    def _follow(
        self,
        losses: Mapping[str, float],
        signs: Mapping[str, bool],
        broken: list[str],
        risen: list[str],
    ) -> None:
        """Tell the open episode of this step, and open one if there is none."""
        here, loss = self._here, losses.get("loss")
        now = self._open = self._open or _Open(here[0], here, self._level())
        out = [name for name, left in signs.items() if left]
        now.astray = [name for name in now.astray if name not in signs] + out
        now.nans.update(dict.fromkeys(broken, here))
        now.lead_end = here if out else now.lead_end
        for name in (*out, *broken):
            if name != "loss":
                now.led(name, here[0])
        if (broken or risen) and now.onset is None:
            now.begin(here, here[0])
        if broken and "loss" in self._levels and len(self._levels["loss"].order) >= MUTED:
            risen = ["loss", *risen]  # a NaN is over when the loss is back at its level
        for name in risen:
            if name not in now.troubles:
                past = self._levels[name]
                now.troubles[name] = Trouble(past.level(), past.sigma(), past.edge(), here)
        if "loss" in broken and "loss" in now.troubles:
            now.troubles["loss"].blind()
        for name in now.troubles.keys() & losses.keys():
            now.troubles[name].saw(*here, losses[name])
        if loss is not None and (now.peak is None or loss > now.peak[0]):
            now.peak = (loss, here[1])

    def _learn(self, losses: Mapping[str, float], leads: Mapping[str, float]) -> None:
        """Let what is in its band enter the past; a slow rise of a loss opens an episode."""
        for name, value in leads.items():
            self._leads[name].push(value)
        for name, value in losses.items():
            past, here = self._levels[name], self._here
            if not past.take(*here, value):
                continue
            spot = past.rose_at(self._after)
            now = self._open = self._open or _Open(here[0], spot, past.base)
            now.begin(min(spot, now.onset or spot), here[0])
            trouble = now.troubles[name] = Trouble(past.base, past.sigma(), past.edge(), here)
            for seen in past.recent:
                if seen[0] >= spot[0]:
                    trouble.saw(*seen)
            trouble.end, trouble.quiet, trouble.outs = here, 0, LEVEL_STEPS

    def snapshot(self) -> dict[str, Any]:
        """Everything a restored grader needs, as JSON can hold it: no NaN, no Inf."""
        now = _plain(self._open) if self._open else None
        if now:
            now["troubles"] = {name: _plain(each) for name, each in now["troubles"].items()}
        return {
            "version": _VERSION,
            "here": self._here,
            "after": self._after,
            "leads": {name: _plain(each) for name, each in self._leads.items()},
            "levels": {name: _plain(each) for name, each in self._levels.items()},
            "open": now,
        }

    @classmethod
    def restore(cls, data: Mapping[str, Any]) -> Self:
        """A grader that goes on as the one that wrote this; ValueError for another version."""
        if data.get("version") != _VERSION:
            raise ValueError(f"version {data.get('version')!r} of an episode snapshot is unknown")
        grader = cls()
        grader._here, grader._after = _spot(data["here"]), data["after"]
        grader._leads = {name: Lead(**each) for name, each in data["leads"].items()}
        grader._levels = {name: Level(**each) for name, each in data["levels"].items()}
        if now := data["open"]:
            troubles = {name: Trouble(**each) for name, each in now["troubles"].items()}
            grader._open = _Open(**{**now, "troubles": troubles})
        return grader
