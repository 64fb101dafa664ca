"""Chaos run, a run with injected faults: the plan, the ranks that a fault hits, requests as those of a user, and the verdict."""
