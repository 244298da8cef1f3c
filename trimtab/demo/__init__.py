"""The demo: a small training run that really spikes, once without trimtab and once with it."""
