"""Rehearsal of a run with faults: the plan, its faults as requests of a user, and the verdict. Observers, spec and the command line import it."""
