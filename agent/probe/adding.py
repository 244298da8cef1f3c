"""Adds up the pieces of a pending update: small ones together, big ones cut, one pass over each.

Nothing the size of the model is kept: temporaries are O(CHUNK).
"""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.agent.probe.formula import FIRST_SUMS, ROW, Coefficients, Form, pass_over
from trimtab.agent.probe.sums import SUMS
from trimtab.controller.engine.bins import BINS

log = logging.getLogger(__name__)

CHUNK = 30 << 10
"""Elements that run at once where nothing is compiled.  120 KiB of float32: from 128 KiB on malloc
gives memory back, and faulting its pages in again costs more than the arithmetic."""

SKETCHED_AT_ONCE = 1 << 22
"""Elements that are sketched at once where the pass is compiled: a byte of every fourth is kept."""

SKETCHED_WHOLE = 1 << 18
"""Elements from which a compiled pass sketches every fourth row of ROW elements, and counts it for
four: that of a row is then off by at most 0.5/sqrt(SKETCHED_WHOLE / 4) = 0.2 % in any bin."""

BIG = 1 << 16
"""Tensors below this are put together, since a call costs more than their elements."""

TOGETHER = 1 << 18
"""Elements that are put together at most."""

_ONE_LOOP: dict[str, Any] = dict.fromkeys(
    ("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"), 10_000
)
"""Inductor's limits above which it writes intermediate results to memory: never."""

_AT = {name: at for at, name in enumerate(SUMS)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter counts."""

    row: int
    """Its layer group."""
    share: float
    """What each of its local elements counts for: 1 over the number of ranks that hold it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of one parameter's pending update."""

    form: Form
    numbers: Coefficients
    place: Place
    tensors: list[Tensor]
    """Of `form.inputs`, all of one shape."""


@dataclass(slots=True)
class _Bucket:
    """Small tensors of one place and one formula."""

    piece: Piece
    columns: list[list[Tensor]] = field(default_factory=list)
    elements: int = 0


class Adder:
    """Adds pieces up; compiled, until that turns out not to work here."""

    def __init__(self, groups: int, *, compiled: bool) -> None:
        """Take the number of layer groups."""
        self._groups = groups
        self._compiled = compiled

    def total(self, pieces: Iterable[Piece], sketch: Tensor | None = None) -> Tensor:
        """Return the first FIRST_SUMS + 1 of SUMS per layer group, float64, (groups, 10).

        Args:
            pieces: What is added up.
            sketch: Counts per layer group and bin, (groups, BINS), float64, that those of the
                pieces are added to; None: not wanted.
        """
        found: list[tuple[Place, Tensor, int]] = []
        buckets: dict[tuple[int, Place], _Bucket] = {}
        for piece in pieces:
            tensors, elements = piece.tensors, piece.tensors[0].numel()
            if elements >= BIG:
                # To fill the last row up is a copy: it joins the small ones.
                rest = elements % ROW if self._compiled else 0
                tensors = [t.reshape(-1) for t in tensors]
                found += self._cut(piece, [t[: elements - rest] for t in tensors], sketch)
                tensors, elements = [t[elements - rest :] for t in tensors], rest
            if elements == 0:
                continue
            key = (id(piece.numbers), piece.place)
            bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = _Bucket(piece, [[] for _ in tensors])
            for column, tensor in zip(bucket.columns, tensors, strict=True):
                column.append(tensor)
            bucket.elements += elements
            if bucket.elements >= TOGETHER:
                found += self._cut(piece, _joined(buckets.pop(key)), sketch)
        for bucket in buckets.values():
            found += self._cut(bucket.piece, _joined(bucket), sketch)
        if not found:
            return torch.zeros((self._groups, FIRST_SUMS + 1), dtype=torch.float64)
        device = found[0][1].device
        columns = torch.stack([sums for _, sums, _ in found])
        counts = torch.tensor([elements for _, _, elements in found], device=device)
        columns[:, FIRST_SUMS] = counts.double()
        columns *= torch.tensor([[place.share] for place, _, _ in found], device=device)
        rows = torch.tensor([place.row for place, _, _ in found], device=device)
        total = torch.zeros((self._groups, FIRST_SUMS + 1), dtype=torch.float64, device=device)
        return total.index_add_(0, rows, columns)

    def _cut(
        self, piece: Piece, flat: list[Tensor], sketch: Tensor | None
    ) -> list[tuple[Place, Tensor, int]]:
        """Pass over a piece in parts of a size that suits, and return (place, sums, elements)."""
        elements, limit = flat[0].numel(), CHUNK
        # What is padded with zeros would be 0/0 without eps, and a state that is not there yet
        # (see `measure`) has no memory that a compiled pass could run over.
        compiled = self._compiled and not (piece.form.exp_avg_sq and piece.numbers.add == 0.0)
        compiled = compiled and all(t.is_contiguous() for t in flat)
        if compiled:
            limit = elements if sketch is None else SKETCHED_AT_ONCE
        found = []
        for start in range(0, elements, limit):
            part = [t[start : start + limit] for t in flat]
            sums = self._add(piece, part, sketch, compiled=compiled)
            found.append((piece.place, sums, part[0].numel()))
        return found

    def _add(
        self, piece: Piece, tensors: list[Tensor], sketch: Tensor | None, *, compiled: bool
    ) -> Tensor:
        elements, padding = tensors[0].numel(), 0
        ratios = int(sketch is not None and piece.form.exp_avg_sq)
        if compiled:
            ratios *= 4 if elements >= SKETCHED_WHOLE else 1
            padding = max(-elements % ROW, 2 * ROW - elements)  # one row would be compiled anew
        if padding:
            tensors = [nn.functional.pad(t, (0, padding)) for t in tensors]
        columns, bins = self._pass(piece, tensors, ratios=ratios, compiled=compiled)
        if padding and piece.numbers.eps > 0.0:
            columns[_AT["below_eps"]] -= padding
        if sketch is not None and bins is not None:
            counts = torch.bincount(bins.view(-1), minlength=BINS).double()
            counts[0] -= columns[FIRST_SUMS]
            rows = (elements + padding) / bins.numel()  # that each sketched row stands for
            sketch[piece.place.row] += counts * (piece.place.share * rows)
        return columns

    def _pass(
        self, piece: Piece, tensors: list[Tensor], *, ratios: int, compiled: bool
    ) -> tuple[Tensor, Tensor | None]:
        numbers = torch.tensor(piece.numbers, dtype=torch.float32, device=tensors[0].device)
        if compiled and self._compiled:
            try:
                return compiled_pass(piece.form, ratios)(tensors, numbers)
            except Exception as error:  # noqa: BLE001  no compiler, or it fails on this machine
                log.warning(
                    "trimtab: torch.compile does not work here, the probe runs uncompiled (slower):"
                    " %s",
                    " ".join(str(error).strip().splitlines()[:2]) or repr(error),
                )
                self._compiled = False
        return pass_over(piece.form, tensors, numbers, row=tensors[0].numel(), ratios=ratios)


@functools.cache
def compiled_pass(form: Form, ratios: int) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return `pass_over` for a form, compiled for tensors of any size: whole rows, at least two."""

    def run(tensors: list[Tensor], numbers: Tensor) -> tuple[Tensor, Tensor | None]:
        return pass_over(form, tensors, numbers, row=ROW, ratios=ratios)

    # Code of its own: torch counts how often one piece of code is compiled, and gives up.
    run.__code__ = run.__code__.replace(co_name=f"pass_{form}_{ratios}")
    compiled: Callable[..., tuple[Tensor, Tensor | None]] = torch.compile(
        run, dynamic=True, fullgraph=True, options=_ONE_LOOP
    )
    return compiled


def _joined(bucket: _Bucket) -> list[Tensor]:
    return [torch.cat([t.reshape(-1) for t in column]) for column in bucket.columns]
