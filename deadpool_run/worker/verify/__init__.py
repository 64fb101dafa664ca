"""Checks that protected state is complete and that replicas agree."""
