"""The registry as a group sees it, and the group as its works see it."""

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from deadpool_run.errors import PeerLostError, RefusedError
from deadpool_run.vault.status_page import RankEntry
from deadpool_run.worker.device.backend import DeviceBackend
from deadpool_run.worker.device.run_ahead import RunAhead
from deadpool_run.worker.groups.collectives import Collective, Parts
from deadpool_run.worker.groups.connect import EpochGroup
from deadpool_run.worker.groups.waits import WaitCancellation, WaitThreads
from deadpool_run.worker.practice import practice
from deadpool_run.worker.process import script_threads
from deadpool_run.worker.transcript.step_digests import DIFFERENT, Marks
from deadpool_run.worker.transcript.transcript import Transcript

_LATE = (
    "{what}: this collective was issued in {where} and is waited for in a later step. If a rank is lost in between, the "
    "result is lost too, and no snapshot holds it.\n"
    "Call wait() in the step that issues it, before the loop asks for the next step."
)

_LOST = (
    "{what}: a peer was lost, and this collective's result with it. It was issued in a thread of the script or in an earlier step, "
    "so that the repeated step does not issue it again.\n"
    "Catch deadpool_run.errors.PeerLostError where the script waits for the thread. Discard what the thread was doing, such as a "
    "checkpoint that it was writing. Do not repeat it on this rank alone: write the next checkpoint at its usual step, on all ranks."
)
_OLDER = (
    "{what}: the thread {thread!r} has been running since before a rank was replaced. The thread of the new process "
    "is elsewhere in its work, so that their collectives would not match.\n"
    "Start a new thread for each piece of work that needs collectives, from the step that needs it."
)

NO_ATTEMPT = -1
"""In place of an attempt: collectives of the script's own threads (a background checkpoint, say) belong to no step."""


def refuse(message: str) -> NoReturn:
    """Raise `RefusedError`."""
    raise RefusedError(message)


class GroupOwner(ABC):
    """The running step and its collectives, and what all groups share.

    `step_failed`: since `begin_step` a collective failed, got a fake result, or was aborted.
    `recording` and `playback`: at most one is set.
    """

    def __init__(self, rank_entry: RankEntry, device: DeviceBackend | None = None) -> None:
        """`device` carries collectives on a device's tensors."""
        script_threads.note_loop()
        self.device = device
        self.run_ahead = RunAhead(device)
        self.intact = True
        """Whether the last step that the host has ended had ended on the device, too, when the abort began."""
        self.step_failed = False
        self.attempt = 0
        """Counts all steps that began, repeated ones too; 0 is set-up. A work belongs to the attempt that issued it."""
        self.in_rehearsed_steps = True
        """Whether this is set-up or one of the first steps, which a replacement rehearses too."""
        self.late_groups: list[str] = []
        """Groups that were created later, and that a replacement lacks. The caller that reports them clears the list."""
        self.recording: Transcript | None = None
        self.playback: Transcript | None = None
        self.wait_threads = WaitThreads()
        self.cancellation = WaitCancellation(self.wait_threads)
        self._rank_entry = rank_entry
        self.marks = Marks(rank_entry)
        self.verify = True
        """Whether a repeated step has to compute the same as before."""
        self.refuse: Callable[[str], NoReturn] = refuse
        """Stops the job; called with the reason why it cannot be kept exact."""
        self.hold: Callable[[], None] = lambda: None
        """Called, from any thread, before a collective returns a fake result or raises; blocks outside the loop."""
        self._issued = itertools.count(1)
        self._waited = itertools.count(1)

    def begin_step(self, step: int = -1, *, rehearsed: bool = False) -> None:
        """Begin a step. `rehearsed`: it is one of the first steps."""
        script_threads.note_loop()
        self.step_failed = False
        practice.end_interrupted()
        self.attempt += 1
        self.in_rehearsed_steps = rehearsed
        self.marks.begin_step(step, marking=self.verify and step >= 0 and not rehearsed)

    def spoil_step(self) -> None:
        """Note that the running step has wrong results and will be repeated. It must not overwrite files with them. Any thread."""
        self.step_failed = True
        practice.interrupt()

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Keep these collectives out of the transcript: a rehearsal does not issue them."""
        recording, self.recording = self.recording, None
        try:
            yield
        finally:
            self.recording = recording

    def mark(self, what: str, tensors: list[Tensor]) -> None:
        """Mark the running step by its first reduction; stop the job if the mark differs from before a loss."""
        if not (self.step_failed or script_threads.is_scripts() or self.marks.put(tensors)):
            self.refuse(DIFFERENT.format(what=what))

    def attempt_here(self) -> int:
        """Return the attempt in which a collective that this thread issues now must be waited for."""
        return NO_ATTEMPT if script_threads.is_scripts() else self.attempt

    def admit(self, what: str) -> None:
        """Refuse a collective of a thread of the script that is older than the last repair."""
        if script_threads.is_scripts() and script_threads.is_older():
            raise PeerLostError(_OLDER.format(what=what, thread=threading.current_thread().name))

    def check_attempt(self, what: str, attempt: int) -> None:
        """Stop the job if this is a later attempt. Collectives of set-up may end in a step that is rehearsed too."""
        if attempt != NO_ATTEMPT and not self._is_running(attempt):
            self.refuse(_LATE.format(what=what, where="an earlier step" if attempt else "set-up"))

    def _is_running(self, attempt: int) -> bool:
        return attempt == self.attempt or (attempt == 0 and self.in_rehearsed_steps)

    def count_issued(self) -> None:
        """Count an issued collective."""
        self._rank_entry.issued = next(self._issued)

    def count_waited(self) -> None:
        """Count a completed collective."""
        self._rank_entry.waited = next(self._waited)

    def _reset_counts(self) -> None:
        """Reset both counts: an abort leaves collectives that were issued and never completed."""
        self._issued, self._waited = itertools.count(1), itertools.count(1)
        self._rank_entry.issued = self._rank_entry.waited = 0

    def count_in(self, rank_entry: RankEntry) -> None:
        """Use this rank entry from now on."""
        self._rank_entry = rank_entry
        self.marks.inherit(rank_entry)
        self._reset_counts()

    def note_fake(self, what: str, attempt: int | None = None) -> None:
        """Note that a collective gets a fake result. `attempt` has issued it; None: this thread does so now.

        Raises `PeerLostError` if it is not of the running step, which is then as good as before: nothing would discard the
        result. In a rehearsal nothing is lost. Outside the loop it holds first: the error would stop a job that runs the script
        again.
        """
        is_steps = self.playback is not None or self._is_running(self.attempt_here() if attempt is None else attempt)
        if is_steps:
            self.spoil_step()
        self.hold()
        if not is_steps:
            raise PeerLostError(_LOST.format(what=what))

    @abstractmethod
    def failed(  # noqa: PLR0913 - what is known of the work, and of its error
        self,
        error: RuntimeError,
        what: str,
        generation: int,
        *,
        attempt: int | None = None,
        may_time_out: bool = False,
        device: DeviceBackend | None = None,
    ) -> None:
        """Start an abort if `error` is the failure of a peer, else raise it. `may_time_out`: a timeout is the user's error.

        `attempt`: see `note_fake`. `device` has raised the error; None: Gloo. A failure on communicators of an older generation
        says nothing about the present ones.
        """

    @abstractmethod
    def find_failure(self) -> bool:
        """Start an abort if the device's library has found a failure by itself; return whether groups on the device are aborted."""

    @abstractmethod
    def connect_host(self, group: Any, epoch: EpochGroup) -> ProcessGroup | None:
        """Return the group's Gloo connections in a job on a device, made first if need be; None if a peer was lost."""

    @abstractmethod
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
