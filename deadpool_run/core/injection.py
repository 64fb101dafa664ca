"""Faults that a user injects, to see how the job recovers."""

from enum import StrEnum


class KillHow(StrEnum):
    """How the worker dies."""

    SIGKILL = "sigkill"
    SIGTERM = "sigterm"
    SIGSEGV = "sigsegv"
    SIGSTOP = "sigstop"
    """It stops, and lives: found as a hang."""
    EXIT = "exit"
    """It ends itself, with code 1."""
    HANG = "hang"
    """It keeps the interpreter for ever, as a C function that never returns: found as a hang."""
    OOM = "oom"
    """Its script gets `torch.OutOfMemoryError`, as when a GPU is full. A spare has no step that needs memory: it ends as with `EXIT`."""


HANGS = frozenset({KillHow.SIGSTOP, KillHow.HANG})
"""The ways after which the process lives on."""
