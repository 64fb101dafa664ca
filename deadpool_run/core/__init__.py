"""The coordinator's decisions: pure, no clock, no I/O. Everything above may import it."""
