"""The coordinator's decisions: pure, no clock, no I/O."""
