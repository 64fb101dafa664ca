"""Rehearsal of a run with faults: the plan, its faults as requests of a user, and the verdict. Imports `view` and below."""
