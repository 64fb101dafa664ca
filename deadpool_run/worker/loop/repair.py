"""A rank's part in a repair: it reports its versions, restores the resume version, and attaches."""

import functools
import traceback
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.distributed_c10d import PrefixStore

from deadpool_run.core import events as ev
from deadpool_run.errors import AttachError, MissingGroupError, RefusedError
from deadpool_run.ids import Epoch, Rank, Version
from deadpool_run.text import clipped
from deadpool_run.vault.status_page import DeviceLibrary, Phase, StatusPage
from deadpool_run.wire.messages import THIS_WORKER, Attach, Captured
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.groups import backend
from deadpool_run.worker.groups.connect import Source, attach_timeout
from deadpool_run.worker.groups.ddp_buckets import Wrappers
from deadpool_run.worker.groups.registry import GroupState, Registry
from deadpool_run.worker.loop import notices
from deadpool_run.worker.loop.replica_checks import ReplicaChecks
from deadpool_run.worker.practice import practice
from deadpool_run.worker.practice.files import file_copies
from deadpool_run.worker.process import sources
from deadpool_run.worker.process.blame import blame
from deadpool_run.worker.process.session import Session
from deadpool_run.worker.snapshot.plan import live_tensors
from deadpool_run.worker.snapshot.snapshot import Snapshots
from deadpool_run.worker.transcript.rehearsal import Rehearsal
from deadpool_run.worker.transcript.transcript import Transcript
from deadpool_run.worker.verify.script_names import current_line, warn


class RepairParticipant:
    """The state of a loop member, and its part in repairs.

    Methods run on the main thread, except `_on_abort`, `_on_interval`, `_on_captured` and `_on_failure`: those only set
    flags, end blocked waits, or send.
    """

    def __init__(self, session: Session, timeout: timedelta | None) -> None:
        self.session = session
        self.completed = Version(0)
        self.total = 0
        """Of the loop's steps; 0 before it begins."""
        self.rehearsing = session.replacement
        self._link = session.link
        self._epoch = session.epoch  # attached to; of a replacement: to join
        self._live: Version | None = None  # the version that the live objects hold, if any
        self._failure: ev.AbortFailed | None = None  # of this run of the script
        self._rehearsal = Rehearsal()
        self._first_of_epoch = False
        self._take_rank_entry()
        self._store_address = session.store
        self._first_store = c10d.open_store(*self._store_address)
        self._store: Source = self._first_store
        self._wrappers = Wrappers()
        self.snapshots = Snapshots(
            slot_fds=session.slot_fds,
            status_page=self._status_page,
            rank=Rank(session.rank),
            on_skip=lambda version, no_memory: self._link.send(ev.CaptureSkipped(THIS_WORKER, version, no_memory)),
            on_captured=self._on_captured,
            interval=session.capture_interval,
            interrupted=lambda: self.interrupted or self.registry.find_failure(),
            wrappers=self._wrappers,
            workers=session.workers,
        )
        self.registry = Registry(rank_entry=self._rank_entry, on_failure=self._on_failure, timeout=timeout)
        self.registry.refuse = self.refuse
        self.replica_checks = ReplicaChecks(session, self.snapshots, self.registry, self.refuse)
        if session.replacement:
            self.registry.playback = Transcript.read(session.transcript_fd)
        else:
            self.registry.recording = Transcript(of_setup=True)
        self._link.subscribe(on_abort=self._on_abort, on_interval=self._on_interval)

    def _take_rank_entry(self) -> None:
        session = self.session
        self._status_page = StatusPage(session.status_page_fd, session.world_size)
        self._rank_entry = self._status_page.rank_entries[session.rank]
        self._rank_entry.worker = session.worker
        self._rank_entry.epoch = session.epoch
        self._rank_entry.phase = Phase.REHEARSAL if session.replacement else Phase.SETUP

    def set_up_groups(self, timeout: timedelta | None) -> None:
        """Create the default group: real with its peers, or rehearsing."""
        session = self.session
        file_copies.replace_writers()
        if self.registry.device is not None:
            self._status_page.device_library = DeviceLibrary.named(self.registry.device.name)
        backend.install(
            self.registry, store=self._first_store, prefix=f"e{self._epoch}", attached=not session.replacement
        )
        dist.init_process_group(
            "deadpool",
            store=PrefixStore(f"g{session.generation}", self._first_store),
            rank=session.rank,
            world_size=session.world_size,
            timeout=timeout,
        )

    def end_setup(self) -> None:
        """Find the script's variables, as its loop begins, and keep what set-up has received."""
        variables = self.snapshots.variables
        self.snapshots.find_variables()
        self._rehearsal.total, self._rehearsal.variables = self.total, variables.facts()
        if self.registry.playback is not None:
            facts = self.registry.playback.facts
            variables.first.compare(facts.get("variables", {}), self._rehearsal.variables)
            if not self.session.preparing:
                self._refuse_other_total(facts)
        if (recording := self.registry.recording) is not None:
            lost = recording.end_setup(each.tensor for each in live_tensors(self.snapshots.protected).values())
            if lost and self.registry.verify:
                self.refuse(notices.too_much_received(lost))

    @property
    def interrupted(self) -> bool:
        """Whether a peer was lost, and this member has not been repaired since."""
        return not self.rehearsing and (
            self._link.orders.epoch > self._epoch or self.registry.state is GroupState.ABORTED
        )

    def refuse(self, why: str, kind: type[RefusedError] = RefusedError) -> NoReturn:
        """Stop the job, because its weights could not be kept exact. Any thread. Raises `kind`."""
        where = current_line()
        why = f"{why}\nFound by rank {self.session.rank}{' at ' if where else ''}{where}."
        self._link.send(ev.JobRefused(THIS_WORKER, why, kind.exit_code))
        error = kind(why)
        error.reported = True
        raise error

    def report_unkept(self) -> None:
        """Warn of variables that change and of groups that are made: a replacement would lack these."""
        late, self.registry.late_groups = self.registry.late_groups, []
        for group in late if self.session.rank == 0 else ():
            warn(notices.late_group(group))
        names, self.snapshots.variables.too_large = self.snapshots.variables.too_large, {}
        for name, why in names.items() if self.session.rank == 0 else ():
            warn(notices.unkept(name, why))

    def _report_failure(self, why: str | BaseException) -> None:
        if isinstance(why, str):
            self._failure = ev.AbortFailed(THIS_WORKER, self._epoch, why)
        else:
            kind, error = type(why).__name__, clipped(str(why))
            self._failure = ev.AbortFailed(
                THIS_WORKER,
                self._epoch,
                f"{kind}: {error}",
                step=self.session.step,
                kind=kind,
                error=error,
                traceback=clipped("".join(traceback.format_exception(why))),
                blame=blame(why),
            )
        self._repeat_failure(self._link.orders.epoch)

    # --- called by other threads ---------------------------------------------------------------------------------

    def _on_abort(self, epoch: Epoch) -> None:
        self.registry.abort()
        self._repeat_failure(epoch)

    def _repeat_failure(self, epoch: int) -> None:
        """Report the script's failure in this epoch. The agent would ignore it in the epoch of the attached groups."""
        if self._failure is not None and epoch > self._epoch:
            self._link.send(replace(self._failure, epoch=epoch, again=self._link.reentrant))

    def _on_interval(self, interval: int) -> None:
        self.snapshots.interval = interval

    def _on_captured(self, version: Version) -> None:
        if self.session.replicate:
            self._link.send(Captured(version))

    def _on_failure(self, message: str) -> None:
        self._link.send(ev.CollectiveFailed(THIS_WORKER, self._epoch, message))

    # --- the repair ----------------------------------------------------------------------------------------------

    def repair(self) -> None:
        """Take part in the repair, outside of the step, until this member is attached again."""
        practice.end_interrupted()  # before any rank repeats the step
        self._rank_entry.phase = Phase.ABORTED
        if not self.registry.intact:
            self._live = None  # the device had not ended the last completed step
        self._negotiate(self._link.orders.wait_newer(self._epoch), has_state=True)

    def begins_step(self) -> bool:
        """Return whether the next step, or the end, begins now: False if a repair comes first. Wait before it, if ordered."""
        orders = self._link.orders
        if orders.begins_step(self.completed, self.total):
            return True
        if not self.registry.has_ended():
            return False
        self._rank_entry.phase, seen = Phase.HELD, None
        while (seen := orders.wait_limit(self.completed, self._epoch, seen)) is not None:
            is_held = self.snapshots.hold(self.completed)
            self._link.send(ev.StepsLimited(THIS_WORKER, self._epoch, self.completed, reached=True, captured=is_held))
        self._rank_entry.phase = Phase.BETWEEN
        return not self.interrupted and orders.begins_step(self.completed, self.total)

    def join(self) -> None:
        """Take the rank's state and join the job, after the rehearsal. Raises `RehearsalError` if that left something out."""
        playback, self.registry.playback = self.registry.playback, None
        if playback is not None:
            if files := sources.edited(playback.facts.get("sources", {})):
                self.refuse(notices.edited(files))
            self._rehearsal.check(playback)
        self.registry.marks.inherit(self._rank_entry)
        if self.session.preparing:
            self._wait_for_rank()
            self._refuse_other_total({} if playback is None else playback.facts)
        self._negotiate(self._link.orders.epoch, has_state=False)
        if names := self.snapshots.variables.left_alone:
            warn(notices.left_alone(names, self.session.rank))
        if different := self.snapshots.variables.first.other_numbers:
            warn(notices.other_numbers(different))

    def _refuse_other_total(self, facts: dict[str, Any]) -> None:
        """Refuse to join a loop of another length. A spare that has no rank yet only rehearses."""
        total = facts.get("total", self.total)
        if total != self.total:
            self.refuse(notices.other_total(self.total, total))

    def learn_replicas(self) -> None:
        """After attaching: note which replicas differ as before the loss; the others have to stay equal."""
        self.replica_checks.learn(self.completed)

    def _wait_for_rank(self) -> None:
        """Wait, as a spare that has rehearsed early, for the rank; take over its memory."""
        self._link.send(ev.SparePrepared(THIS_WORKER))
        self.session.take(*self._link.orders.wait_assigned())
        self._take_rank_entry()
        self._epoch = self.session.epoch
        self.snapshots.interval = self.session.capture_interval
        self.snapshots.move(self.session.slot_fds, self._status_page, Rank(self.session.rank))
        self.registry.count_in(self._rank_entry)

    def _negotiate(self, epoch: Epoch, *, has_state: bool) -> None:
        """Report, restore, attach; begin again whenever a newer epoch comes in between."""
        orders = self._link.orders
        while True:
            if has_state:
                self.snapshots.wait()
                self._link.send(
                    ev.AbortCompleted(THIS_WORKER, epoch, self.completed, self._live, tuple(self.snapshots.held()))
                )
            else:
                self._link.send(ev.ReplacementRehearsed(THIS_WORKER, epoch))
            version = orders.wait_resume(epoch)
            if version is not None:
                self._bring_to(Version(version))
                has_state = True
                self._link.send(ev.RankRestored(THIS_WORKER, epoch))
                order = orders.wait_attach(epoch)
                if order is not None and self._attach(order):
                    return
            epoch = orders.wait_newer(epoch)

    def _bring_to(self, version: Version) -> None:
        self._rank_entry.phase = Phase.RESTORING
        if self._live == version:
            self.snapshots.rewind(version)
        else:
            self._live = None
            self.snapshots.restore(version, self.registry)
        if self.snapshots.lost:
            self.refuse(self.snapshots.lost[0])
        self.snapshots.discard_newer(version)
        self.completed = self._live = version
        self._rank_entry.completed = version
        if version not in self.snapshots.held():
            self.snapshots.begin(version)

    def _attach(self, order: Attach) -> bool:
        """Attach in the order's epoch; False if that failed or a newer epoch came in between."""
        epoch = order.epoch
        self._rank_entry.phase = Phase.ATTACHING
        self._follow_store(order)
        limit = attach_timeout(self.session.world_size, len(self.registry.groups))
        try:
            self.registry.attach(self._store, f"e{epoch}", limit, cancelled=lambda: self._link.orders.epoch > epoch)
        except AttachError as error:
            if self._link.orders.epoch == epoch:
                if isinstance(error, MissingGroupError):
                    self.refuse(str(error))
                self._link.send(ev.AttachFailed(THIS_WORKER, epoch, str(error), error.unreached))
            return False
        self._epoch = epoch
        if self.rehearsing:
            self.rehearsing = False
            practice.end()
        if self._link.orders.epoch > epoch:  # came while the groups were being attached
            self.registry.abort()
            return False
        self._rank_entry.epoch = epoch
        self._rank_entry.phase = Phase.BETWEEN
        self._first_of_epoch = True
        self._link.send(ev.RankAttached(THIS_WORKER, epoch))
        return True

    def _follow_store(self, order: Attach) -> None:
        """Use the store's new address. The attach connects to it, because an attach can be interrupted."""
        address = (order.store_host, order.store_port)
        if order.store_host and address != self._store_address:
            self._store_address = address
            self._store = functools.partial(c10d.open_store, *address, attach_timeout(self.session.world_size))
