"""The distribution of Adam's ratio m/sqrt(v): a histogram of fixed bins, and its dip statistic.

Histograms of shards add up to that of the whole.  The dip statistic (Hartigan and Hartigan, 1985)
is 0 for a unimodal distribution and grows as it parts in two; the Adam instability paper
(arXiv 2304.09871, section 7.1) proposes it as a measure of modality.  The bins are filled by the
agent; the dip is worked out by the run actor when an observation comes.
"""

import math
from collections.abc import Sequence

import diptest
import numpy as np
import numpy.typing as npt

BINS = 256
LOW, HIGH = -4.0, 4.0
"""Edges of the outermost bins, which also take what lies beyond.

|m/sqrt(v)| is at most (1 - beta1)/sqrt(1 - beta2) for one gradient after silence: 3.2 with Adam's
defaults.  With steady gradients it is at most about 1."""

BIN_WIDTH = (HIGH - LOW) / BINS
"""1/32: the dip is that of the values moved by at most half of this."""

SAMPLES = 256
"""Values that a histogram is read as: its quantiles at (i + 0.5)/256.

The dip of the histogram differs from that of its values by at most 1/512 (from the quantiles) and
by the share of values in the fullest bin (from the bins)."""

_EDGES = np.linspace(LOW, HIGH, BINS + 1)

Counts = npt.NDArray[np.int64]


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
