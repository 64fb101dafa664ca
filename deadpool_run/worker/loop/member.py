"""A rank's part in the job: its steps and its end. Everything here runs on the script's main thread."""

import time
from datetime import timedelta
from typing import NoReturn

import torch

from deadpool_run.core import events as ev
from deadpool_run.errors import PeerLostError, StepAborted
from deadpool_run.ids import Version
from deadpool_run.vault.status_page import Phase
from deadpool_run.wire.messages import THIS_WORKER
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.compat.modules import has_buckets
from deadpool_run.worker.groups import backend
from deadpool_run.worker.groups.ddp_buckets import LateBuckets, check_undecided
from deadpool_run.worker.loop.repair import RepairParticipant
from deadpool_run.worker.loop.trial import Trial
from deadpool_run.worker.loop.updates import OUTSIDE_LOOP, Updates, first_gradient, refuse_captured
from deadpool_run.worker.practice import practice
from deadpool_run.worker.process.session import Session
from deadpool_run.worker.snapshot import buckets
from deadpool_run.worker.state.redundancy import replica_leader
from deadpool_run.worker.transcript.rehearsal import REHEARSAL_STEPS
from deadpool_run.worker.transcript.transcript import Transcript
from deadpool_run.worker.verify.agreement import any_rank
from deadpool_run.worker.verify.coverage import Coverage, is_sampled
from deadpool_run.worker.verify.script_names import warn


class LoopMember(RepairParticipant):
    """A rank in its training loop."""

    def __init__(self, session: Session, timeout: timedelta | None, *, verify: bool = True) -> None:
        """With `verify`, one step is run twice after a start: see `trial`."""
        super().__init__(session, timeout)
        self.practising = session.resume >= 0  # rehearses the first steps with its peers, then resumes version `resume`
        self._practised = True  # no peer was lost in those steps
        self.trial = Trial(wanted=verify and not (self.rehearsing or self.practising), tells=session.rank == 0)
        self._coverage = Coverage(self.snapshots.protected, self.snapshots.variables.keeps)
        self._transcript: Transcript | None = None  # recorded, not complete yet
        self._in_loop = self._in_step = self._left_loop = False
        self._stopped = False  # the optimizer was stopped in this step
        self._released = False
        self._step_began_ns = 0
        self._optimizers = False  # there is an optimizer, and weights change only there
        session.loss_pending, session.report_and_wait = self.loss_pending, self.report_and_wait
        self.registry.hold = self._hold
        self.registry.verify = verify
        if verify:
            self.snapshots.variables.refuse = self._refuse_lost
        self._updates = Updates(self._before_optimizer, self._stop_if_lost)
        self._late = LateBuckets(self._decide_buckets, lambda: self.is_rehearsal or self.registry.recording is not None)

    # --- steps ---------------------------------------------------------------------------------------------------
    # A step lasts from the moment the loop receives its index until it asks for the next: code after `with step:` (a
    # scheduler's step, an evaluation) belongs to it. Version k is the state in which the loop received index k. So a step
    # that is repeated is repeated whole.

    def enter_loop(self, total: int) -> None:
        """Capture the state after set-up, before a loop of `total` steps. A replacement, and a start from a checkpoint, have nothing to capture yet."""
        self._in_loop, self.total, self._status_page.total_steps = True, total, total
        self._optimizers = bool(self.snapshots.protected.optimizers)
        for module in self.snapshots.protected.modules.values():
            module.find_wrappers()
        self.end_setup()
        self._coverage.begin(rehearses=self.rehearsing)
        if not self.rehearsing:
            if not self.practising:
                self._live = self.completed
                self.registry.run_ahead.join()
                self.snapshots.capture_now(self.completed)
            self._link.send(ev.SetupCompleted(THIS_WORKER))
        self._rank_entry.phase = Phase.BETWEEN

    def begin_step(self, index: int) -> None:
        """Start the step that the loop is about to receive."""
        self.session.step = index
        self._stopped = False
        self._updates.begin_step()
        self._late.begin_step()
        self.registry.begin_step(index, rehearsed=index < REHEARSAL_STEPS)
        if not (self.rehearsing or self.practising):
            self.snapshots.protected.watch_gradients(index, copying=self.trial.running)
        self._step_began_ns = time.monotonic_ns()

    def enter_step(self) -> None:
        """`with step:` begins."""
        self._in_step = True
        self._rank_entry.phase = Phase.REHEARSAL if self.rehearsing or self.practising else Phase.STEP

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Before weights change: stop if a peer was lost, or wait until a running capture has read them."""
        refuse_captured(optimizer)
        self._note_update(optimizer, has_closure=bool(args or kwargs))
        if self.rehearsing:
            return
        self._stop_if_lost()
        self.registry.run_ahead.note()
        self.snapshots.wait()
        # If a peer died now with its copy half written, two steps would be lost: this one and the one it was copying.
        if self._in_step and not (
            self._updates.begun or c10d.in_backward() or self.snapshots.copy_thread.settle_peers()
        ):
            self._stopped = True
            raise StepAborted("a peer was lost while it copied its snapshot")
        if not self._updates.begun:
            self.snapshots.check_writes()
        self._optimizers = True
        self._updates.note()
        self.snapshots.note_optimizer(optimizer, has_closure=bool(args or kwargs))
        if self._in_step:
            self._rank_entry.phase = Phase.OPTIMIZER

    def _stop_if_lost(self) -> None:
        """Stop the step if a peer was lost, but not in a backward: autograd and FSDP2 would be left half-way."""
        if self._in_step and self.step_failed and not c10d.in_backward():
            self._stopped = True
            raise StepAborted("a peer was lost during this step")

    def _note_update(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Note the optimizer: it must be protected, and a rehearsal must step it too. With a closure, there are no gradients yet."""
        if not self._in_loop:
            if self._updates.note_outside():
                self._link.send(ev.LoopBypassed(THIS_WORKER))
                warn(OUTSIDE_LOOP)
            return
        if (index := self.session.step) is None:
            return
        if index < REHEARSAL_STEPS and (name := self.snapshots.name_of(optimizer)) is not None:
            self._rehearsal.optimizers.add(name)
        if not self.rehearsing:
            self._coverage.note(optimizer, index)
            if self.registry.marks.open and not has_closure:
                self.registry.mark("gradient", first_gradient(optimizer))

    def exit_step(self, error: BaseException | None) -> bool:
        """`with step:` ends; return whether to swallow its exception."""
        self._in_step = False
        self._rank_entry.phase = Phase.REHEARSAL if self.rehearsing or self.practising else Phase.BETWEEN
        if isinstance(error, PeerLostError) and self.interrupted:  # of a thread for which the step has waited
            self._stopped, error = True, None
        if error is None or isinstance(error, StepAborted):
            if self._stopped or self.registry.step_failed:
                self.snapshots.wait()  # the body goes on after the block, and may write to what is being copied
                practice.interrupt()
            return True
        if not isinstance(error, Exception):
            return False
        if self.rehearsing:
            self._rehearsal.raised(error)
            return True
        if self.registry.find_failure() or self.registry.step_failed:
            self.report_and_wait(error)
        return False

    def close_step(self) -> None:
        """Complete the step when the loop asks for the next, unless a peer was lost in it."""
        index, self.session.step = self.session.step, None
        assert index is not None
        step_failed, ddps = not self.rehearsing and self._failed_at_end(), self.snapshots.protected.ddps()
        if index == REHEARSAL_STEPS - 1:
            self._rehearsal.buckets = list(map(has_buckets, ddps))
            self.snapshots.variables.rehearsed()
        self._late.watch(ddps if index or not self._rehearsal.optimizers else ())
        if self.rehearsing:
            return
        if index and not (step_failed or self.trial.running):  # DDP cannot decide in the first step
            self._decide_buckets()
        if not step_failed:
            self._updates.check(index)
            if problem := self._coverage.problem(index, look=is_sampled(index) or self.trial.tries):
                self.refuse(problem)
        if self.practising:
            self._practised &= not step_failed
        elif self.trial.running and not step_failed:
            self.trial.observe(self.snapshots.observe(), self.snapshots.variables.counts())
            self._live = None
        elif step_failed or not self._peers_ready():
            self._discard(step_failed=step_failed)
        elif self._is_verified(index) and self.replica_checks.agree(Version(index + 1), self.total):
            self._complete()
        else:
            self._live = None  # a rank was lost while replicas were compared

    def _decide_buckets(self) -> None:
        with self.registry.unrecorded():
            buckets.decide(self.snapshots.protected, self.registry)

    def _discard(self, *, step_failed: bool) -> None:
        """End a step that will be repeated: find out which version the live objects hold."""
        if step_failed and self._updates.always and not (self._stopped or self._updates.reached):
            # The script skipped its optimizer for the first time: it caught an exception.
            self.report_and_wait("its step ended without a step of an optimizer")
        kept = self._stopped and not self._updates.begun and self.snapshots.is_untouched()
        self._live = self.completed if kept else None

    def _is_verified(self, step: int) -> bool:
        """After the second run of the trial, compare it with the first; False if a rank was lost meanwhile."""
        if self.trial.stage is not Trial.Stage.RAN:
            return True
        with self.registry.unrecorded():
            is_proof = not any_rank(self._late.in_step)
            updated = any_rank(self._updates.begun or not self._optimizers)
        if self.registry.step_failed:
            return False
        variables = self.snapshots.variables
        if is_proof and (
            why := self.trial.verdict(step, self.snapshots.observe(), variables.counts(), variables.left_out)
        ):
            self.refuse(why)
        variables.put_back()
        self.trial.conclude(updated=updated and is_proof)
        return True

    def learn_replicas(self) -> None:
        """After attaching: agree whether the trial is still due, and note which replicas differ as before the loss."""
        due = any_rank(self.trial.stage is not Trial.Stage.OVER)
        self.trial.interrupt(due=due)
        self._updates.ever = due and any_rank(self._updates.ever)  # a replacement has not seen earlier updates
        super().learn_replicas()

    @property
    def is_rehearsal(self) -> bool:
        """Whether the running step does not count: a rehearsal, or the first run of the trial."""
        return self.rehearsing or self.practising or self.trial.running

    @property
    def step_failed(self) -> bool:
        """Whether the running step is known to be repeated later."""
        return not self.rehearsing and (self.registry.step_failed or self._stopped)

    def _peers_ready(self) -> bool:
        """Wait for the peers' copies in a step without an update; False if a rank was lost meanwhile.

        If such a step has no collectives either (`no_sync`), ranks would run steps apart.
        """
        return self._updates.begun or not self._optimizers or self.snapshots.copy_thread.settle_version(self.completed)

    def _failed_at_end(self) -> bool:
        """Return whether a peer is known to be lost in the step. On a device that may show when the next step ends."""
        now = self.completed < REHEARSAL_STEPS or self.practising or self.trial.stage is not Trial.Stage.OVER
        self.registry.run_ahead.end_step(now=now)
        return self.registry.find_failure() or self.registry.step_failed or self._stopped

    def _complete(self) -> None:
        now = time.monotonic_ns()
        self.completed = self._live = Version(self.completed + 1)
        self._updates.complete_step()
        self._rank_entry.step_ns = now - self._step_began_ns
        if self._optimizers:
            self.snapshots.begin(self.completed)
        else:  # a script that changes weights by hand may do so at any moment: copy before it goes on
            self.snapshots.capture_now(self.completed)
        self.report_unkept()
        # Only now that the copy has begun: peers that wait for it would go on.
        self._rank_entry.completed = self.completed
        self.snapshots.end_early(look=is_sampled(self.completed - 1))
        if self._first_of_epoch:
            self._first_of_epoch = False
            self._link.send(ev.FirstStepCompleted(THIS_WORKER, self._epoch))
        if self.completed >= REHEARSAL_STEPS:
            self._complete_transcript()

    def _refuse_lost(self, why: str) -> NoReturn:
        """Refuse a script that uses a variable that was lost. In a step that will be repeated, that proves nothing."""
        if self.step_failed or self.loss_pending():
            raise StepAborted(why)
        self.refuse(why)

    def _complete_transcript(self) -> None:
        """Store the transcript of set-up and the first steps, once: from now on a replacement can rehearse."""
        self._stop_recording()
        transcript, self._transcript = self._transcript, None
        if transcript is not None:
            self._rehearsal.store(transcript, self.session.transcript_fd)
            self._link.send(
                ev.TranscriptCompleted(THIS_WORKER, replica_leader(self.snapshots.protected.modules.values()))
            )

    def _stop_recording(self) -> None:
        self._transcript = self.registry.recording or self._transcript
        self.registry.recording = None

    def _bring_to(self, version: Version) -> None:
        if problem := self._coverage.changed():  # through `.data`, say
            self.refuse(problem)
        super()._bring_to(version)

    # --- the trial -----------------------------------------------------------------------------------------------

    def begin_trial(self) -> bool:
        """Start the trial of the next step; False if it is not due, or if a rank was lost."""
        due = self.trial.stage is Trial.Stage.DUE and 0 < self.completed < self.total
        if not due or not buckets.reduces_repeatably(self.snapshots.protected, updated=self._updates.ever):
            return False
        is_held = self.snapshots.hold(self.completed)
        with self.registry.unrecorded():
            some_without = any_rank(not is_held)
        if self.registry.step_failed:
            return False
        if some_without:  # for lack of memory: ranks that tried would wait for those that do not
            self.trial.conclude(updated=False)
            return False
        self.snapshots.look()
        self.trial.begin(self.snapshots.variables.counts(), self.snapshots.variables.left_out())
        practice.begin(in_trial=True)
        return True

    def end_trial(self) -> None:
        """End the trial: restore the state before it, as after a loss. If a rank was lost, a repair does that."""
        practice.end()
        self._stop_recording()  # replacements rehearse this run of the step: the next one creates nothing lazily
        self.trial.end()
        if self.interrupted:
            return
        self._rank_entry.phase = Phase.RESTORING
        self.snapshots.variables.trying = True
        self.snapshots.restore(self.completed)
        self.snapshots.variables.trying = False
        self._live = self.completed
        self._rank_entry.phase = Phase.BETWEEN

    # --- failures of the script ----------------------------------------------------------------------------------

    def loss_pending(self) -> bool:
        """Whether a peer was lost and not replaced yet: a failure of the script may be a consequence."""
        return not self.rehearsing and not self._released and (self.interrupted or self.registry.step_failed)

    def report_and_wait(self, why: str | BaseException) -> NoReturn:
        """Report that the script failed after a loss, perhaps half-way through an update. Wait until it runs again or ends."""
        self._report_failure(why)
        self._link.orders.wait_left()

    def break_off(self) -> None:
        """Note that the script left its loop early. It cannot be stopped here, where nothing can be raised."""
        if self.loss_pending():
            self._report_failure("it left its loop")
        self._left_loop = True

    def leave(self) -> tuple[Version, tuple[Version, ...]]:
        """Tear down this run of the script, before the next. Returns the steps completed and the versions held."""
        self.session.capture_interval = self.snapshots.interval
        self.session.store = self._store_address
        self.close()
        backend.uninstall(self.registry)
        held = self._rank_entry.held
        self._rank_entry.clear(keep_slots=True)
        return self.completed, held

    def _hold(self) -> None:
        """Stop a cut collective whose fake result would be used: outside the loop the script may save it.

        There it waits: the agent ends this process, or every rank comes back to run the end of the script again.
        """
        if self.rehearsing or self.registry.playback is not None:
            return
        if self._released or self._left_loop or not self._in_loop:
            self._link.orders.wait_end()
        check_undecided()

    # --- a checkpoint from before the job ------------------------------------------------------------------------

    def resume(self) -> None:
        """Resume from the version in the slot, after the first steps were rehearsed.

        Everything lazy exists by now, as in the run that wrote the checkpoint: DDP has the same buckets, and so the same
        sums to the last bit. The transcript is of set-up and the first two steps, as in any run.
        """
        if not self._practised:  # the world starts again: there is nothing to repair yet
            self._link.orders.wait_left()
        self._bring_to(Version(self.session.resume))
        self.practising = False
        self._rank_entry.phase = Phase.BETWEEN
        practice.end()
        self._complete_transcript()

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Wait until every rank's last snapshot is committed; False if a repair is needed first."""
        self._complete_transcript()
        if not self.registry.has_ended():
            return False
        self.snapshots.wait(cancel_pending=False)  # a skipped version is never committed, even if it is captured later
        if self.completed not in self.snapshots.held():
            self.snapshots.capture_now(self.completed)
        self._rank_entry.phase = Phase.FINISHED
        self._link.send(ev.LoopFinished(THIS_WORKER, self.completed))
        self._released = self._link.orders.wait_release(self._epoch)
        return self._released

    def close(self) -> None:
        """Free groups and mappings, before the process ends."""
        self._updates.close()
        self._wrappers.close()
        self.registry.shut_down()
        self.snapshots.close()
