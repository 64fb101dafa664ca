"""Every deadpool group of this process: attached, cut and attached again together, under the user's live objects.

States: REHEARSING (a replacement: answers are fake or from the transcript) -> ATTACHED -> DRAINING (a member was lost:
answers are fake, nothing blocks, nothing raises) -> ATTACHED to the next epoch.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from deadpool_run.errors import AttachError, RefusedError
from deadpool_run.vault.status_page import RankEntry
from deadpool_run.worker.groups import gloo, nccl
from deadpool_run.worker.groups.connect import Build, GroupConnections, GroupMeeting, GroupPlan, Inner, Source
from deadpool_run.worker.groups.group import Group
from deadpool_run.worker.groups.marks import DIFFERENT, Marks
from deadpool_run.worker.groups.transcript import Transcript
from deadpool_run.worker.groups.waits import WaitCancellation, WaitThreads
from deadpool_run.worker.groups.works import LATE

_FREE_S = 1.0
"""How long the freeing of old communicators is waited for. Gloo's threads end at once, unless one is stuck with a
message that was cut in the middle."""
_LOST_MEANWHILE = "a further member was lost while communicators were built"


def refuse(message: str) -> NoReturn:
    """Raise `RefusedError`."""
    raise RefusedError(message)


class GroupState(Enum):
    """What answers the collectives of this process."""

    REHEARSING = "rehearsing"
    ATTACHED = "attached"
    DRAINING = "draining"


class Registry:
    """Every deadpool group of this process, in the order of their creation.

    `step_failed`: since `begin_step` a collective failed, was answered by the fake, or was cut by `abort`.
    `recording` and `playback`: at most one is set.
    """

    def __init__(
        self, *, rank_entry: RankEntry | None, on_failure: Callable[[str], None], timeout: timedelta | None = None
    ) -> None:
        """`on_failure` is told once per epoch, from any thread, that a collective failed by itself.

        `timeout` is that of the user's collectives; None takes what the script gives to `init_process_group`.
        """
        self.state = GroupState.REHEARSING
        self.step_failed = False
        self.attempt = 0
        """Counts the steps that were begun, repeated ones too; 0 is set-up. A work belongs to the one that issued it."""
        self.in_rehearsed_steps = True
        """Whether this is set-up or one of the first steps, which a replacement's rehearsal has too."""
        self.recording: Transcript | None = None
        self.playback: Transcript | None = None
        self.groups: list[Group] = []
        self.wait_threads = WaitThreads()
        self.cancellation = WaitCancellation(self.wait_threads)
        self.generation = 1
        self._rank_entry = rank_entry
        self.marks = Marks(rank_entry)
        self.on_failure = on_failure
        self.refuse: Callable[[str], NoReturn] = refuse
        """Stops the job; called with the reason why it cannot be kept exact."""
        self._timeout = timeout
        self._lock = threading.RLock()
        self._device: gloo.Device | None = None
        self._meeting: GroupMeeting | None = None
        self._connections: GroupConnections | None = None
        self._prefix = ""
        self._worlds = 0
        self._peers: tuple[gloo.Endpoint, ...] | None = None
        self._build: Build | None = None
        self._retired: list[Inner] = []
        self._issued = itertools.count(1)
        self._waited = itertools.count(1)

    # --- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int = -1, *, rehearsed: bool = False) -> None:
        """Forget what happened to earlier collectives. `rehearsed`: it is one of the first steps."""
        self.step_failed = False
        self.attempt += 1
        self.in_rehearsed_steps = rehearsed
        self.marks.begin_step(step, marking=step >= 0 and not rehearsed)

    def mark(self, what: str, tensors: list[Tensor]) -> None:
        """Mark the step that runs by what it reduces first; refuse to go on if it was another thing before a loss."""
        if not self.step_failed and not self.marks.put(tensors):
            self.refuse(DIFFERENT.format(what=what))

    def waited_late(self, what: str, attempt: int) -> None:
        """Refuse a collective that is waited for in a later step than the one that issued it; set-up's are rehearsed too."""
        if attempt == 0 and self.in_rehearsed_steps:
            return
        self.refuse(LATE.format(what=what, where="an earlier step" if attempt else "set-up"))

    def count_issued(self) -> None:
        """Count a collective that is issued."""
        if self._rank_entry is not None:
            self._rank_entry.issued = next(self._issued)

    def count_waited(self) -> None:
        """Count a collective that has completed."""
        if self._rank_entry is not None:
            self._rank_entry.waited = next(self._waited)

    def _count_anew(self) -> None:
        """Start both counts again: what a drain cut was issued and never completed, and a replacement has no past."""
        self._issued, self._waited = itertools.count(1), itertools.count(1)
        if self._rank_entry is not None:
            self._rank_entry.issued = self._rank_entry.waited = 0

    def count_in(self, rank_entry: RankEntry) -> None:
        """Count in this rank entry from now on."""
        self._rank_entry = rank_entry
        self.marks.inherit(rank_entry)
        self._count_anew()

    def note_fake(self) -> None:
        """Note that a collective is answered by the fake."""
        self.step_failed = True

    @contextmanager
    def answered_by(self, group: Group, transcript: Transcript) -> Iterator[None]:
        """Have the group answer by what was recorded; a drain that begins meanwhile stands."""
        with self._lock:
            before = self.state, self.playback, self.step_failed
            group.cover()
            self.playback = transcript
        try:
            yield
        finally:
            with self._lock:
                state, self.playback, step_failed = before
                self.step_failed = step_failed or self.state is not state
                group.uncover()

    # --- draining --------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Free every collective of this process, now, and answer later ones by the fake. Any thread; idempotent.

        A registry that rehearses stays so: it has nothing to free.
        """
        with self._lock:
            if self._build is not None:
                self._build.cancel(_LOST_MEANWHILE)
            self._drain()

    def failed(self, error: RuntimeError, what: str, generation: int, *, may_time_out: bool = False) -> None:
        """Start a drain if a peer is to blame for `error`, else raise it. `may_time_out`: a time-out is the user's.

        What fails on communicators that are no longer in use says nothing of those that are.
        """
        with self._lock:
            if self.state is GroupState.ATTACHED and generation == self.generation:
                if not gloo.is_peer_failure(error) or (may_time_out and not gloo.is_broken(error)):
                    try:
                        raise error
                    finally:
                        del error  # see `GuardedWork._fail`
                self._drain()
                first = True
            else:
                first = False
            self.step_failed = True
        if first:
            self.on_failure(f"{what}: {error}")

    def _drain(self) -> None:
        if self.state is not GroupState.ATTACHED:
            return
        self.state = GroupState.DRAINING
        nccl_backends = self._retire()
        if nccl_backends:
            self.step_failed = True  # on CUDA nobody can say which of the step's collectives the abort has cut
            nccl.abort_all(nccl_backends)
        if self._device is not None and self._peers is not None:
            self._device.sever(self._peers)
        self.cancellation.schedule(self.generation)

    def _retire(self) -> list[Any]:
        """Detach every group; return the NCCL backends. What is retired is freed by `attach`, never by a callback."""
        backends = []
        for group in self.groups:
            inner, backend = group.detach()
            if inner is not None:
                self._retired.append(inner)
            if backend is not None:
                backends.append(backend)
        return backends

    def _free(self, inners: list[Any]) -> None:
        """Free communicators in another thread, because that joins Gloo's, and wait for it if it does not take long.

        Never under the lock, which callbacks on Gloo's threads may want.
        """
        if not any(inners):
            return
        freed = threading.Event()

        def free() -> None:
            inners.clear()
            freed.set()

        self.wait_threads.start(free)
        freed.wait(_FREE_S)

    # --- attaching -------------------------------------------------------------------------------------------------

    def attach(
        self,
        store: Source,
        prefix: str,
        timeout: timedelta,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Build every group anew with its peers, under keys that begin with `prefix`, and leave the drain.

        `store` is the same object as the last time unless it has moved.

        `cancelled` is asked once, when `interrupt_attach` works already: a caller that learns of a further loss just
        before the call sees it here, and one that learns of it later interrupts. Raises `AttachError`; the groups then
        stay fake.
        """
        with self._lock:
            self._drain()
            retired, self._retired = self._retired, []
        self._free(retired)
        meeting = self._open(store, prefix)
        groups = list(self.groups)
        build = Build(self._the_device(), meeting, [group.plan for group in groups], timeout)
        with self._lock:
            self._build = build
        try:
            if cancelled():
                raise AttachError(_LOST_MEANWHILE)
            inners = build.run(None)
            with self._lock:
                if build.cancelled:  # between its end and here
                    raise AttachError(_LOST_MEANWHILE)
                self.generation += 1
                for group, inner in zip(groups, inners, strict=True):
                    group.attach(inner, self.generation)
                self._peers = build.peers
                self._count_anew()
                self.state = GroupState.ATTACHED
                self.step_failed = False
        finally:
            with self._lock:
                self._build = None

    def interrupt_attach(self) -> None:
        """Make an `attach` that is under way raise, within milliseconds. Any thread."""
        with self._lock:
            if self._build is not None:
                self._build.cancel(_LOST_MEANWHILE)

    def shut_down(self) -> None:
        """Free every communicator; the groups answer by the fake from now on. For the end of the process or the job."""
        with self._lock:
            self._drain()
            retired, self._retired = self._retired, []
            self.groups.clear()
        self._free(retired)
        self._device = self._connections = None

    # --- groups ----------------------------------------------------------------------------------------------------

    def create(self, options: Any) -> Group:
        """Return a new group (`options` are torch's `_DistributedBackendOptions`)."""
        world = not options.global_ranks_in_group
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        plan = GroupPlan(options.group_id, options.group_rank, ranks, self._timeout or options.timeout)
        group = Group(self, plan)
        if world:
            assert self._connections is not None
            # A script may destroy its world and make another one: their keys must differ.
            prefix = f"{self._prefix}/w{self._worlds}" if self._worlds else self._prefix
            self._worlds += 1
            self._meeting = GroupMeeting(self._connections, prefix, options.group_rank, options.group_size)
        inner = self._build_one(plan, world=world) if self.state is GroupState.ATTACHED else None
        with self._lock:
            self.groups.append(group)
            if inner is not None and self.state is GroupState.ATTACHED:
                group.attach(inner, self.generation)
            elif inner is not None:  # a drain has begun meanwhile
                self._retired.append(inner)
        return group

    def _build_one(self, plan: GroupPlan, *, world: bool) -> Inner | None:
        """Build a new group in the current epoch; None if a peer was lost, which starts a drain.

        Raises `AttachError` for the world's own group: without it there is nothing to drain.
        """
        assert self._meeting is not None
        build = Build(self._the_device(), self._meeting, [plan], plan.timeout)
        with self._lock:
            self._build = build
        try:
            (inner,) = build.run(None if world else self._peers)
        except AttachError as error:
            if world:
                raise
            self._creation_failed(error)
            return None
        finally:
            with self._lock:
                self._build = None
        if world:
            self._peers = build.peers
        return inner

    def _creation_failed(self, error: AttachError) -> None:
        with self._lock:
            already = self.state is not GroupState.ATTACHED
            self._drain()
            self.step_failed = True
        if not already:
            self.on_failure(f"new_group: {error}")

    def forget(self, group: Group) -> None:
        """Free a group that its user destroyed."""
        with self._lock:
            if group in self.groups:
                self.groups.remove(group)
            inner, backend = group.detach()
            inners = [inner]
            del inner  # so that the last reference is the list's
        self._free(inners)
        if backend is not None:
            backend.shutdown()

    def place(self, store: Store, prefix: str, *, attached: bool) -> None:
        """Say where groups that are created from now on meet, and whether they are real."""
        self._connections = GroupConnections(store)
        self._connections.prepare()
        self._prefix = prefix
        self.state = GroupState.ATTACHED if attached else GroupState.REHEARSING

    def _open(self, store: Source, prefix: str) -> GroupMeeting:
        if self._meeting is None:
            raise AttachError("there is no group to attach: call torch.distributed.init_process_group first.")
        if self._connections is None or self._connections.source is not store:
            self._connections = GroupConnections(store)
        self._prefix, self._worlds = prefix, 1
        self._meeting = GroupMeeting(self._connections, prefix, self._meeting.rank, self._meeting.size)
        return self._meeting

    def _the_device(self) -> gloo.Device:
        if self._device is None:
            self._device = gloo.Device()
        return self._device
