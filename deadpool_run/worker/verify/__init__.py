"""Checks that protected state is complete and that replicas agree. Snapshot and loop import it."""
