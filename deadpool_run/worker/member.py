"""A rank's worker as a member of the job: its steps, its repairs, its end.

Everything here runs on the script's main thread, except `_heard_abort`, `_heard_interval`, `_captured` and `_suspect`,
which only set flags, free blocked waits, or send.
"""

import functools
import time
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deadpool_run.errors import AttachError, StepAborted
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.board import Board, Phase
from deadpool_run.wire import messages
from deadpool_run.worker import compat, groups, marking
from deadpool_run.worker.attach import Source
from deadpool_run.worker.session import Session
from deadpool_run.worker.snapshot import Snapshots
from deadpool_run.worker.straying import Straying
from deadpool_run.worker.transcript import Transcript

REHEARSAL_STEPS = 2
"""DDP rebuilds its buckets at the second forward; FSDP2's lazy parts, optimizer state and compilation come earlier."""

ATTACH_TIMEOUT = timedelta(seconds=30)
"""Bound of one attach. Every member is known to be ready when it starts, so that it takes milliseconds."""


class Member:
    """One rank's part in the job. Not thread-safe but for what the module's docstring names."""

    def __init__(self, session: Session, timeout: timedelta | None) -> None:
        self.session = session
        self.completed = Version(0)
        self.rehearsing = session.newcomer
        self.practising = session.resume >= 0  # plays the first steps with its peers before it goes on from `resume`
        self._practised = True  # no peer was lost in those steps
        self._link = session.link
        self._epoch = session.epoch  # the epoch that this member is attached to (a newcomer: is to join)
        self._live: Version | None = None  # the version that the objects hold; None: none
        self._updated = False  # an optimizer has begun to change weights in this step
        self._in_step = False
        self._stopped = False  # the optimizer was stopped in this step
        self._updates = False  # every undisturbed step so far has stepped an optimizer, and there was one
        self._steps_done = 0  # undisturbed ones, by this run of the script
        self._straying = Straying(session.link)
        self._released = False
        self._first_of_epoch = False
        self._step_began_ns = 0
        self._optimizers = False  # there is some optimizer: weights change there and nowhere else
        self._take_cell()
        self._store_address = (session.store_host, session.store_port)
        self._first_store = compat.open_store(*self._store_address)
        self._store: Source = self._first_store
        self.snapshots = Snapshots(
            slot_fds=session.slot_fds,
            board=self._board,
            rank=Rank(session.rank),
            on_skip=lambda version: self._link.send(messages.Skipped(version)),
            on_captured=self._captured,
            interval=session.capture_interval,
            interrupted=lambda: self.interrupted,
        )
        self.registry = groups.Registry(cell=self._cell, on_failure=self._suspect, timeout=timeout)
        if session.newcomer:
            self.registry.playback = Transcript.read(session.transcript_fd)
        else:
            self.registry.recording = Transcript()
        session.disturbed, session.give_up = self.disturbed, self.give_up
        self._link.subscribe(on_abort=self._heard_abort, on_interval=self._heard_interval)
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def _take_cell(self) -> None:
        session = self.session
        self._board = Board(session.board_fd, session.world_size)
        self._cell = self._board.cells[session.rank]
        self._cell.worker = session.worker
        self._cell.epoch = session.epoch
        self._cell.phase = Phase.REHEARSAL if session.newcomer else Phase.SETUP

    def set_up_groups(self, timeout: timedelta | None) -> None:
        """Create the default group: real with its peers, or rehearsing."""
        session = self.session
        groups.install(self.registry, store=self._first_store, prefix=f"e{self._epoch}", attached=not session.newcomer)
        dist.init_process_group(
            "deadpool",
            store=PrefixStore(f"g{session.generation}", self._first_store),
            rank=session.rank,
            world_size=session.world_size,
            timeout=timeout,
        )

    # --- told by other threads -----------------------------------------------------------------------------------

    def _heard_abort(self, epoch: int) -> None:
        if not self.rehearsing:
            self.registry.abort()
        self.registry.interrupt_attach()
        self._straying.tell(epoch, attached=self._epoch)

    def _heard_interval(self, interval: int) -> None:
        self.snapshots.interval = interval

    def _captured(self, version: Version) -> None:
        if self.session.replicate:
            self._link.send(messages.Captured(version))

    def _suspect(self, message: str) -> None:
        self._link.send(messages.PeerSuspected(self._epoch, message))

    # --- steps ---------------------------------------------------------------------------------------------------
    #
    # A step lasts from the moment the loop is given its index to the moment the loop asks for the next: what the body
    # does after `with step:` (a scheduler's step, an evaluation) belongs to it, and version k is the state in which
    # the loop was given index k. So a step that is run again is run again whole.

    def enter_loop(self) -> None:
        """Protect what set-up made. A newcomer has nothing to protect yet, nor has who goes on from a checkpoint."""
        self._optimizers = self.snapshots.has_optimizers()
        if not self.rehearsing:
            if not self.practising:
                self._live = self.completed
                self.snapshots.capture_now(self.completed)
            self._link.send(messages.SetupDone())
        self._cell.phase = Phase.BETWEEN

    @property
    def interrupted(self) -> bool:
        """Whether a loss was noticed that this member has not been repaired from."""
        return not self.rehearsing and (
            self._link.orders.epoch > self._epoch or self.registry.state is groups.GroupState.DRAINING
        )

    def begin_step(self, index: int) -> None:
        """Note that the loop is about to be given this index."""
        self.session.step = index
        self._updated = self._stopped = False
        self.registry.begin_step()
        self._step_began_ns = time.monotonic_ns()

    def enter_step(self) -> None:
        """`with step:` begins."""
        self._in_step = True
        self._cell.phase = Phase.REHEARSAL if self.rehearsing or self.practising else Phase.STEP

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Weights are about to change: last moment to stop, and not before the running capture has read them."""
        if self.rehearsing:
            return
        if self._in_step and self.registry.tainted:
            self._stopped = True
            raise StepAborted("a peer was lost during this step")
        self.snapshots.wait()
        # A peer that died now, its copy half made, would cost this step and the one that it had not kept.
        if self._in_step and not self._updated and not self.snapshots.wait_for_peers():
            self._stopped = True
            raise StepAborted("a peer was lost while it made its snapshot")
        self._optimizers = self._updated = True
        self.snapshots.note_optimizer(optimizer)
        if self._in_step:
            self._cell.phase = Phase.OPTIMIZER

    def exit_step(self, error: BaseException | None) -> bool:
        """`with step:` ends; return whether its exception only says that the step was interrupted."""
        self._in_step = False
        self._cell.phase = Phase.REHEARSAL if self.rehearsing or self.practising else Phase.BETWEEN
        if error is None or isinstance(error, StepAborted):
            if self._stopped or self.registry.tainted:
                self.snapshots.wait()  # the body goes on behind the block, and may write to what is being copied
            return True
        if not isinstance(error, Exception):
            return False
        if self.rehearsing:
            return True
        if self.registry.tainted:
            self.give_up(error)
        return False

    def close_step(self) -> None:
        """Count the step, for which the loop asks for the next, unless a lost peer spoilt it."""
        index, self.session.step = self.session.step, None
        spoilt = not self.rehearsing and self._spoilt()
        if index and not spoilt:  # in the first step nobody can decide
            self.snapshots.settle_buckets(self.registry)
        if self.rehearsing:
            return
        if self.practising:
            self._practised &= not spoilt
        elif spoilt or not self._in_company():
            if spoilt and self._updates and not (self._stopped or self._updated):
                # It came past its optimizer by another way than ever before: by an exception that the script kept.
                self.give_up("its step ended without a step of an optimizer")
            kept = self._stopped and not self._updated and self.snapshots.is_untouched()
            self._live = self.completed if kept else None
        else:
            self._complete()

    @property
    def spoilt(self) -> bool:
        """Whether it is known already that the step that runs will be repeated."""
        return not self.rehearsing and (self.registry.tainted or self._stopped)

    def _in_company(self) -> bool:
        """Wait, in a step in which no optimizer has, for the peers' copies; False if a rank was lost meanwhile.

        Where such a step has no collectives either (`no_sync`), ranks would come to be steps apart.
        """
        return self._updated or not self._optimizers or self.snapshots.wait_for_version(self.completed)

    def _spoilt(self) -> bool:
        """Tell whether a lost peer spoilt the step. On CUDA a cut collective looks like a success until it has run."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
            return self.registry.tainted or self.registry.state is groups.GroupState.DRAINING
        return self.registry.tainted or self._stopped

    def _complete(self) -> None:
        now = time.monotonic_ns()
        self.completed = self._live = Version(self.completed + 1)
        self._updates = self._updated and (self._updates or self._steps_done == 0)
        self._steps_done += 1
        self._cell.step_ns = now - self._step_began_ns
        self._cell.step_ended_ns = now
        if self._optimizers:
            self.snapshots.begin(self.completed)
        else:  # weights that a script changes by hand may change at any moment: copy before it goes on
            self.snapshots.capture_now(self.completed)
        self._cell.completed = self.completed  # not before the copy is under way: peers that wait for it would go on
        if self._first_of_epoch:
            self._first_of_epoch = False
            self._link.send(messages.FirstStep(self._epoch))
        if self.registry.recording is not None and self.completed >= REHEARSAL_STEPS:
            self._seal()

    def _seal(self) -> None:
        transcript = self.registry.recording
        self.registry.recording = None
        if transcript is not None:
            transcript.write(self.session.transcript_fd)
            self._link.send(messages.Sealed(self.snapshots.likeness()))

    # --- what cannot be drained ----------------------------------------------------------------------------------

    def disturbed(self) -> bool:
        """Tell whether the script may go astray now because a peer was lost."""
        return not self.rehearsing and not self._released and (self.interrupted or self.registry.tainted)

    def give_up(self, why: str | BaseException) -> NoReturn:
        """Wait to be told to run the script again, or for the end.

        It went astray on what a lost peer left, so that its objects may be half-way.
        """
        self._break(why)
        epoch = self._epoch
        while True:
            epoch = self._link.orders.wait_newer(epoch)

    def break_off(self) -> None:
        """Note that the script has left its loop early. It is not stopped here: nothing can be raised."""
        if self.disturbed():
            self._break("it left its loop")

    def _break(self, why: str | BaseException) -> None:
        self._straying.note(why, self.session.step)
        self._straying.tell(self._link.orders.epoch, attached=self._epoch)

    def leave(self) -> tuple[int, list[int]]:
        """Take down what this run of the script made: another begins. Returns the steps done and the versions held."""
        self.session.capture_interval = self.snapshots.interval
        self.session.store_host, self.session.store_port = self._store_address
        self.close()
        groups.uninstall(self.registry)
        held: list[int] = list(self._cell.held)
        self._cell.clear(keep_slots=True)
        return self.completed, held

    # --- a checkpoint from before the job ------------------------------------------------------------------------

    def go_on(self) -> None:
        """Practised: go on from the version that the slot was filled with.

        Everything lazy has been made by now as in the run that wrote it (DDP has the same buckets, and so the same sums
        to the last bit), and the transcript is of set-up and the first two steps, as ever.
        """
        version = Version(self.session.resume)
        while not self._practised:  # the world is started again: nothing of it is worth a repair
            self._link.orders.wait_newer(self._epoch)
        self._cell.phase = Phase.RESTORING
        self.snapshots.restore(version)
        self.snapshots.tell_buckets(self.registry)
        self.practising = False
        self.completed = self._live = version
        self._cell.completed = version
        self._cell.phase = Phase.BETWEEN
        marking.lift()
        self._seal()

    # --- repairs -------------------------------------------------------------------------------------------------

    def repair(self) -> None:
        """Drained: take part in the repair until this member is attached again."""
        self._cell.phase = Phase.DRAINED
        self._negotiate(self._link.orders.wait_newer(self._epoch), rehearsed=True)

    def join(self) -> None:
        """Rehearsed: take the rank's state and part in the job."""
        self.registry.playback = None
        if self.session.preparing:
            self._wait_for_rank()
        self._negotiate(self._link.orders.epoch, rehearsed=False)

    def _wait_for_rank(self) -> None:
        """Wait, as a spare that has rehearsed ahead of need, until the rank is given to it; take over its memory."""
        self._link.send(messages.Prepared())
        self.session.take(*self._link.orders.wait_assigned())
        self._take_cell()
        self._epoch = self.session.epoch
        self.snapshots.interval = self.session.capture_interval
        self.snapshots.move(self.session.slot_fds, self._board, Rank(self.session.rank))
        self.registry.count_in(self._cell)

    def _negotiate(self, epoch: int, *, rehearsed: bool) -> None:
        """Report, restore, attach; begin again whenever a newer epoch comes between."""
        orders = self._link.orders
        has_state = rehearsed
        while True:
            if has_state:
                self.snapshots.wait()
                self._link.send(messages.Drained(epoch, self.completed, self._live, list(self.snapshots.held())))
            else:
                self._link.send(messages.Rehearsed(epoch))
            version = orders.wait_resume(epoch)
            if version is not None:
                self._bring_to(Version(version))
                has_state = True
                self._link.send(messages.Restored(epoch))
                order = orders.wait_attach(epoch)
                if order is not None and self._attach(order):
                    return
            epoch = orders.wait_newer(epoch)

    def _bring_to(self, version: Version) -> None:
        self._cell.phase = Phase.RESTORING
        if self._live == version:
            self.snapshots.rewind(version)
        else:
            self._live = None
            self.snapshots.restore(version)
            self.snapshots.tell_buckets(self.registry)
        self.snapshots.discard_newer(version)
        self.completed = self._live = version
        self._cell.completed = version
        if version not in self.snapshots.held():
            self.snapshots.begin(version)

    def _attach(self, order: messages.Attach) -> bool:
        """Attach to the order's epoch; False if it failed or a newer one came meanwhile."""
        epoch = order.epoch
        self._cell.phase = Phase.ATTACHING
        self._follow_store(order)
        try:
            self.registry.attach(
                self._store, f"e{epoch}", ATTACH_TIMEOUT, cancelled=lambda: self._link.orders.epoch > epoch
            )
        except AttachError as error:
            if self._link.orders.epoch == epoch:
                self._link.send(messages.AttachBroke(epoch, str(error)))
            return False
        self._epoch = epoch
        if self.rehearsing:
            self.rehearsing = False
            marking.lift()
        if self._link.orders.epoch > epoch:  # heard while the groups were being attached: they are void
            self.registry.abort()
            return False
        self._cell.epoch = epoch
        self._cell.phase = Phase.BETWEEN
        self._first_of_epoch = True
        self._link.send(messages.Attached(epoch))
        return True

    def _follow_store(self, order: messages.Attach) -> None:
        """Meet at the store where it is now. The connecting is left to the attach, which can be interrupted."""
        address = (order.store_host, order.store_port)
        if order.store_host and address != self._store_address:
            self._store_address = address
            self._store = functools.partial(compat.open_store, *address, ATTACH_TIMEOUT)

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Stay until every rank's last snapshot is committed; False if a repair is needed first."""
        if self.registry.recording is not None:
            self._seal()
        self.snapshots.wait(hurry=False)  # what was given up once is never committed, though it is captured after all
        if self.completed not in self.snapshots.held():
            self.snapshots.capture_now(self.completed)
        self._cell.phase = Phase.FINISHED
        self._link.send(messages.Finished(self.completed))
        self._released = self._link.orders.wait_release(self._epoch)
        return self._released

    def close(self) -> None:
        """Free groups and mappings; the process is about to end."""
        self._hook.remove()
        self.registry.shut_down()
        self.snapshots.close()
