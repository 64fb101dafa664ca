"""Protocols: the registry as a group sees it, and the group as its works see it."""

from typing import Any, Protocol

import torch

from deadpool_run.worker.groups.collectives import Collective, Parts
from deadpool_run.worker.groups.marks import Marks
from deadpool_run.worker.groups.transcript import Transcript
from deadpool_run.worker.groups.waits import WaitCancellation, WaitThreads


class GroupOwner(Protocol):
    """The registry that a group belongs to."""

    recording: Transcript | None
    playback: Transcript | None
    wait_threads: WaitThreads
    cancellation: WaitCancellation
    attempt: int
    marks: Marks

    def mark(self, what: str, tensors: list[torch.Tensor]) -> None:
        """Mark the running step by its first reduction."""

    def waited_late(self, what: str, attempt: int) -> None:
        """Stop the job: a collective is waited for in a later step."""

    def count_issued(self) -> None:
        """Count an issued collective."""

    def count_waited(self) -> None:
        """Count a completed collective."""

    def note_fake(self) -> None:
        """Note that a collective got a fake result."""

    def failed(self, error: RuntimeError, what: str, generation: int, *, may_time_out: bool = False) -> None:
        """Start a drain if a peer failed, else raise the error."""

    def forget(self, group: Any) -> None:
        """Free a group that the script destroyed."""


class Issuer(Protocol):
    """The group that issued a work."""

    registry: GroupOwner
    generation: int

    @property
    def other_rank(self) -> int:
        """The rank of another member."""

    def answer(self, collective: Collective, parts: Parts) -> None:
        """Write the fake result."""
