"""Faults that a user asks for, to see them repaired."""

from enum import StrEnum


class KillHow(StrEnum):
    """How a worker is made to die."""

    SIGKILL = "sigkill"
    SIGTERM = "sigterm"
    SIGSEGV = "sigsegv"
    EXIT = "exit"
