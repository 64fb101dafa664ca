"""The coordinator's decisions: deterministic, no clock, no I/O. Everything above may import it."""
