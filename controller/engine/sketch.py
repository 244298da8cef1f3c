"""The distribution of Adam's ratio m/sqrt(v): a histogram of fixed bins, and its dip statistic.

Histograms of shards add up to that of the whole.  The dip statistic (Hartigan and Hartigan, 1985)
is 0 for a unimodal distribution and grows as it parts in two; the Adam instability paper
(arXiv 2304.09871, section 7.1) proposes it as a measure of modality.  The bins are filled by the
agent; the dip is worked out before an observation enters the engine.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import diptest
import numpy as np
import numpy.typing as npt

from trimtab.controller.engine.bins import BINS, HIGH, LOW
from trimtab.controller.engine.model import Layout, Observation

SAMPLES = 256
"""Values that a histogram is read as: its quantiles at (i + 0.5)/256.

The dip of the histogram differs from that of its values by at most 1/512 (from the quantiles) and
by the share of values in the fullest bin (from the bins)."""

_EDGES = np.linspace(LOW, HIGH, BINS + 1)

Counts = npt.NDArray[np.int64]


def with_dips(observation: Observation, layout: Layout) -> Observation:
    """Return the observation with the dips of its sketch in place of the sketch.

    Raises:
        ValueError: If the sketch does not fit the registered layer groups.
    """
    if not observation.ratio_sketch:
        return observation
    values, vectors = dips(counts_of(observation.ratio_sketch, len(layout.layer_groups)))
    return replace(
        observation,
        values={**observation.values, **values},
        vectors={**observation.vectors, **vectors},
        ratio_sketch=(),
    )


def counts_of(flat: Sequence[int], groups: int) -> Counts:
    """Return the counts per layer group, shape (groups, BINS).

    Raises:
        ValueError: If the number of counts is another.
    """
    counts = np.asarray(flat, dtype=np.int64)
    if counts.size != groups * BINS:
        raise ValueError(
            f"a sketch of {counts.size} counts, {groups} layer groups of {BINS} were registered"
        )
    return counts.reshape(groups, BINS)


def dips(
    counts: Counts,
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Return ratio_dip and ratio_dip_pvalue of all groups together, and of each.

    Args:
        counts: Shape (groups, BINS).

    A group without values has NaN, and nothing is returned of a job without any.
    """
    if not counts.sum():
        return {}, {}
    dip, pvalue = dip_of(counts.sum(axis=0))
    found = [dip_of(row) for row in counts]
    values = {"ratio_dip": dip, "ratio_dip_pvalue": pvalue}
    return values, {
        "ratio_dip": tuple(dip for dip, _ in found),
        "ratio_dip_pvalue": tuple(pvalue for _, pvalue in found),
    }


def dip_of(counts: Counts) -> tuple[float, float]:
    """Return the dip statistic of a histogram and its p-value; NaN for an empty one."""
    total = int(counts.sum())
    if total == 0:
        return math.nan, math.nan
    size = min(SAMPLES, total)
    if size < 4:  # the dip of fewer values says nothing
        return 0.0, 1.0
    dip, pvalue = diptest.diptest(_quantiles(counts, size), sort_x=False)
    return float(dip), float(pvalue)


def _quantiles(counts: Counts, size: int) -> npt.NDArray[np.float64]:
    """Return `size` evenly spaced quantiles, the values of a bin spread evenly over it."""
    upto = np.zeros(BINS + 1)
    np.cumsum(counts, out=upto[1:])
    wanted = (np.arange(size) + 0.5) * (upto[-1] / size)
    quantiles: npt.NDArray[np.float64] = np.interp(wanted, upto, _EDGES)
    return quantiles
