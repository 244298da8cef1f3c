"""Bins of the distribution of Adam's ratio m/sqrt(v).  Filled by the agent, read by `sketch`."""

BINS = 256
LOW, HIGH = -4.0, 4.0
"""Edges of the outermost bins, which also take what lies beyond.

|m/sqrt(v)| is at most (1 - beta1)/sqrt(1 - beta2) for one gradient after silence: 3.2 with Adam's
defaults.  With steady gradients it is at most about 1."""

BIN_WIDTH = (HIGH - LOW) / BINS
"""1/32: the dip is that of the values moved by at most half of this."""
