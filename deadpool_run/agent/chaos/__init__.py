"""Rehearsal of a run with faults: the plan, the ranks that a fault hits, requests as those of a user, and the verdict."""
