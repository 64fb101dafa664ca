"""What a group needs of its registry, and a work of its group."""

from typing import Any, Protocol

import torch

from deadpool_run.worker.groups.collectives import Collective, Parts
from deadpool_run.worker.groups.marks import Marks
from deadpool_run.worker.groups.transcript import Transcript
from deadpool_run.worker.groups.waits import WaitCancellation, WaitThreads


class GroupOwner(Protocol):
    """What a group needs of the registry that it belongs to."""

    recording: Transcript | None
    playback: Transcript | None
    wait_threads: WaitThreads
    cancellation: WaitCancellation
    attempt: int
    marks: Marks

    def mark(self, what: str, tensors: list[torch.Tensor]) -> None:
        """Mark the step that runs by what it reduces first."""

    def waited_late(self, what: str, attempt: int) -> None:
        """Refuse a collective that is waited for in a later step than the one that issued it."""

    def count_issued(self) -> None:
        """Count a collective that is issued."""

    def count_waited(self) -> None:
        """Count a collective that has completed."""

    def note_fake(self) -> None:
        """Note that a collective is answered by the fake."""

    def failed(self, error: RuntimeError, what: str, generation: int, *, may_time_out: bool = False) -> None:
        """Drain if a peer is to blame, else raise the error."""

    def forget(self, group: Any) -> None:
        """Free a group that its user destroyed."""


class Issuer(Protocol):
    """What a work needs of the group that issued it."""

    registry: GroupOwner
    generation: int

    @property
    def other_rank(self) -> int:
        """A rank that is not ours."""

    def answer(self, collective: Collective, parts: Parts) -> None:
        """Answer a collective as the fake does."""
