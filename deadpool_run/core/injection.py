"""Faults that a user injects, to see how the job recovers."""

from enum import StrEnum


class KillHow(StrEnum):
    """How the worker dies."""

    SIGKILL = "sigkill"
    SIGTERM = "sigterm"
    SIGSEGV = "sigsegv"
    EXIT = "exit"
