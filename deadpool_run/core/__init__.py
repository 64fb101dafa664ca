"""The coordinator's decisions: deterministic, no clock, no I/O."""
