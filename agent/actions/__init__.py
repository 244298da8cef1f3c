"""What can be done to a pending update or to the run, one file per action."""
