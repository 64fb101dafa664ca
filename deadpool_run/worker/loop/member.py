"""A rank's worker as a member of the job: its steps and its end. Everything here runs on the script's main thread."""

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deadpool_run.errors import ReplicasDifferError, StepAborted
from deadpool_run.ids import Version
from deadpool_run.vault.status_page import Phase
from deadpool_run.wire import messages
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.compat.modules import local
from deadpool_run.worker.groups import backend
from deadpool_run.worker.groups.registry import GroupState
from deadpool_run.worker.groups.transcript import Transcript
from deadpool_run.worker.loop.repair import RepairParticipant
from deadpool_run.worker.loop.trial import Trial
from deadpool_run.worker.process import rehearsal_output
from deadpool_run.worker.process.session import Session
from deadpool_run.worker.verify.agreement import ReplicaDifference
from deadpool_run.worker.verify.coverage import is_sampled

REHEARSAL_STEPS = 2
"""DDP rebuilds its buckets at the second forward; FSDP2's lazy parts, optimizer state and compilation come earlier."""

_OUTSIDE_LOOP = (
    "this script updates weights outside of job.steps(): nothing protects it, and a lost rank starts it from the beginning.\n"
    "Write `for step in job.steps(N):` and `with step:` around the step."
)
_OUTSIDE = 3
"""So many updates before the step loop are a loop of the script's own; one or two may warm something up."""


class LoopMember(RepairParticipant):
    """One rank's part in the job."""

    def __init__(self, session: Session, timeout: timedelta | None, *, verify: bool = True) -> None:
        """With `verify`, step 1 is run twice on a fresh start: see `trial`."""
        super().__init__(session, timeout)
        self.practising = session.resume >= 0  # plays the first steps with its peers before it goes on from `resume`
        self._practised = True  # no peer was lost in those steps
        self.trial = Trial(wanted=verify and not (self.rehearsing or self.practising))
        self._transcript: Transcript | None = None  # recorded, and not yet sealed
        self._in_loop = False
        self._outside = 0  # updates of weights before the loop
        self._updated = False  # an optimizer has begun to change weights in this step
        self._in_step = False
        self._stopped = False  # the optimizer was stopped in this step
        self._updates = False  # every undisturbed step so far has stepped an optimizer, and there was one
        self._steps_done = 0  # undisturbed ones, by this run of the script
        self._released = False
        self._step_began_ns = 0
        self._optimizers = False  # there is some optimizer: weights change there and nowhere else
        session.disturbed, session.give_up = self.disturbed, self.give_up
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    # --- steps ---------------------------------------------------------------------------------------------------
    #
    # A step lasts from the moment the loop is given its index to the moment the loop asks for the next: what the body
    # does after `with step:` (a scheduler's step, an evaluation) belongs to it, and version k is the state in which
    # the loop was given index k. So a step that is run again is run again whole.

    def enter_loop(self) -> None:
        """Protect what set-up made. A replacement has nothing to protect yet, nor has who goes on from a checkpoint."""
        self._in_loop = True
        self._optimizers = self.snapshots.has_optimizers()
        self.snapshots.find_wrappers()
        if not self.rehearsing:
            self.snapshots.coverage.begin()
            if not self.practising:
                self._live = self.completed
                self.snapshots.capture_now(self.completed)
            self._link.send(messages.SetupDone())
        self._rank_entry.phase = Phase.BETWEEN

    def begin_step(self, index: int) -> None:
        """Note that the loop is about to be given this index."""
        self.session.step = index
        self._updated = self._stopped = False
        self.registry.begin_step(index, rehearsed=index < REHEARSAL_STEPS)
        self._step_began_ns = time.monotonic_ns()

    def enter_step(self) -> None:
        """`with step:` begins."""
        self._in_step = True
        self._rank_entry.phase = Phase.REHEARSAL if self.rehearsing or self.practising else Phase.STEP

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Weights are about to change: last moment to stop, and not before the running capture has read them."""
        self._note_update(optimizer, has_closure=bool(args or kwargs))
        if self.rehearsing:
            return
        in_backward = c10d.in_backward()  # where nothing may be raised: autograd and FSDP2 would be left half-way
        if self._in_step and self.registry.step_failed and not in_backward:
            self._stopped = True
            raise StepAborted("a peer was lost during this step")
        self.snapshots.wait()
        # A peer that died now, its copy half made, would cost this step and the one that it had not kept.
        if self._in_step and not (self._updated or in_backward or self.snapshots.wait_for_peers()):
            self._stopped = True
            raise StepAborted("a peer was lost while it made its snapshot")
        if not self._updated:
            self.snapshots.check_writes()
        self._optimizers = self._updated = True
        self.snapshots.note_optimizer(optimizer)
        if self._in_step:
            self._rank_entry.phase = Phase.OPTIMIZER

    def _note_update(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Note who updates: it must be protected, and a rehearsal must do the same.

        With a closure there are no gradients of this step yet.
        """
        if not self._in_loop:
            self._outside += 1
            if self._outside == _OUTSIDE:
                self._link.send(messages.TrainsOutsideLoop())
                warnings.warn(_OUTSIDE_LOOP, RuntimeWarning, stacklevel=3)
            return
        index = self.session.step
        if index is None:
            return
        if index < REHEARSAL_STEPS and (name := self.snapshots.name_of(optimizer)) is not None:
            self._rehearsal.made.optimizers.add(name)
        if not self.rehearsing:
            self.snapshots.coverage.note(optimizer, index)
            if self.registry.marks.open and not has_closure:
                gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
                self.registry.mark("gradient", [local(each) for each in gradients if each is not None][:1])

    def exit_step(self, error: BaseException | None) -> bool:
        """`with step:` ends; return whether its exception only says that the step was interrupted."""
        self._in_step = False
        self._rank_entry.phase = Phase.REHEARSAL if self.rehearsing or self.practising else Phase.BETWEEN
        if error is None or isinstance(error, StepAborted):
            if self._stopped or self.registry.step_failed:
                self.snapshots.wait()  # the body goes on behind the block, and may write to what is being copied
            return True
        if not isinstance(error, Exception):
            return False
        if self.rehearsing:
            self._rehearsal.raised(error)
            return True
        if self.registry.step_failed:
            self.give_up(error)
        return False

    def close_step(self) -> None:
        """Count the step, for which the loop asks for the next, unless a lost peer spoilt it."""
        index, self.session.step = self.session.step, None
        step_failed = not self.rehearsing and self._step_failed()
        if index == REHEARSAL_STEPS - 1:
            self._rehearsal.made.buckets = self.snapshots.decided_buckets()
        if self.rehearsing:
            return
        if index and not (step_failed or self.trial.running):  # in the first step nobody can decide
            with self._unrecorded():
                self.snapshots.settle_buckets(self.registry)
        assert index is not None
        if not step_failed:
            problem = self.snapshots.coverage.problem(index, look=is_sampled(index))
            if problem:
                self.refuse(problem)
        if self.practising:
            self._practised &= not step_failed
        elif self.trial.running and not step_failed:
            self.trial.observe(self.snapshots.observe())
            self._live = None
        elif step_failed or not self._in_company():
            self._void(step_failed=step_failed)
        elif self._is_verified(index) and self._agrees(Version(index + 1)):
            self._complete()
        else:
            self._live = None  # a rank was lost while replicas were compared

    def _void(self, *, step_failed: bool) -> None:
        """End a step that will be repeated: see which version the objects hold."""
        if step_failed and self._updates and not (self._stopped or self._updated):
            # It came past its optimizer by another way than ever before: by an exception that the script kept.
            self.give_up("its step ended without a step of an optimizer")
        kept = self._stopped and not self._updated and self.snapshots.is_untouched()
        self._live = self.completed if kept else None

    def _is_verified(self, step: int) -> bool:
        """Hold the second run of a step against the trial. Stops the job if they differ."""
        if self.trial.stage is Trial.Stage.RAN and (why := self.trial.verdict(step, self.snapshots.observe())):
            self.refuse(why)
        return True

    @property
    def step_failed(self) -> bool:
        """Whether it is known already that the step that runs will be repeated."""
        return not self.rehearsing and (self.registry.step_failed or self._stopped)

    def _in_company(self) -> bool:
        """Wait, in a step in which no optimizer has, for the peers' copies; False if a rank was lost meanwhile.

        Where such a step has no collectives either (`no_sync`), ranks would come to be steps apart.
        """
        return self._updated or not self._optimizers or self.snapshots.wait_for_version(self.completed)

    def _step_failed(self) -> bool:
        """Tell whether a lost peer spoilt the step. On CUDA a cut collective looks like a success until it has run."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
            return self.registry.step_failed or self.registry.state is GroupState.DRAINING
        return self.registry.step_failed or self._stopped

    def _complete(self) -> None:
        now = time.monotonic_ns()
        self.completed = self._live = Version(self.completed + 1)
        self._updates = self._updated and (self._updates or self._steps_done == 0)
        self._steps_done += 1
        self._rank_entry.step_ns = now - self._step_began_ns
        self._rank_entry.step_ended_ns = now
        if self._optimizers:
            self.snapshots.begin(self.completed)
        else:  # weights that a script changes by hand may change at any moment: copy before it goes on
            self.snapshots.capture_now(self.completed)
        self._rank_entry.completed = (
            self.completed
        )  # not before the copy is under way: peers that wait for it would go on
        self.snapshots.end_early(look=is_sampled(self.completed - 1))
        if self._first_of_epoch:
            self._first_of_epoch = False
            self._link.send(messages.FirstStep(self._epoch))
        if self.completed >= REHEARSAL_STEPS:
            self._seal()

    def _seal(self) -> None:
        """Keep what set-up and the first steps received, once: a replacement can rehearse from now on."""
        self._stop_recording()
        transcript, self._transcript = self._transcript, None
        if transcript is not None:
            self._rehearsal.write_into(transcript)
            transcript.write(self.session.transcript_fd)
            self._link.send(messages.Sealed(self.snapshots.likeness()))

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Leave what is received out of the transcript: a rehearsal does not do it."""
        recording, self.registry.recording = self.registry.recording, None
        try:
            yield
        finally:
            self.registry.recording = recording

    def _stop_recording(self) -> None:
        self._transcript = self.registry.recording or self._transcript
        self.registry.recording = None

    def _agrees(self, version: Version) -> bool:
        """Compare replicas, at some versions; False if a rank was lost meanwhile. Stops the job if a repair spoilt them."""
        agreement = self.snapshots.agreement
        strict = agreement.is_strict(version)
        if not strict and not (version >= REHEARSAL_STEPS and is_sampled(version - 1)):
            return True
        with self._unrecorded():
            difference = agreement.compare(strict=strict)
        if self.registry.step_failed:
            return False
        if difference is not None:
            self._stop_for(difference, version)
        return True

    def _stop_for(self, difference: ReplicaDifference, version: Version) -> NoReturn:
        rank = self.session.rank
        evidence = Path(os.environ.get("DEADPOOL_RUN_DIR", "")) / "evidence"
        if rank in difference.odd or rank == min(set(difference.ranks) - set(difference.odd), default=rank):
            self.snapshots.keep_evidence(evidence / f"rank-{rank}.pt", difference.names, version)
        difference.wait_for_all()
        self.refuse(
            f"replicas that were equal before a loss differ after its repair, at version {version}: {difference}.\n"
            f"The job stops: version {version - 1} is the last one that is known to be right. Both versions of these tensors "
            f"are kept in {evidence}. Run `deadpool-run check` on the script to find out why.",
            ReplicasDifferError,
        )

    # --- the trial -----------------------------------------------------------------------------------------------

    def begin_trial(self, total: int) -> bool:
        """Have the next step be run for practice; False if that is not due, or if a rank was lost before."""
        if not (self.trial.may_begin(self.completed, total) and self.snapshots.repeats_alike()):
            return False
        self.snapshots.wait(hurry=False)
        if self.completed not in self.snapshots.held() and not self.snapshots.capture_now(self.completed):
            return False
        self.snapshots.look()
        self.trial.stage = Trial.Stage.RUNNING
        rehearsal_output.install()
        return True

    def end_trial(self) -> None:
        """End the practice: put its beginning back, as after a loss. A rank that was really lost ends the trial."""
        rehearsal_output.lift()
        self._stop_recording()  # what replacements rehearse is this run of the step: the next one makes nothing lazily
        self.trial.end()
        if self.interrupted:
            return
        self._rank_entry.phase = Phase.RESTORING
        self.snapshots.restore(self.completed)
        self._live = self.completed
        self._rank_entry.phase = Phase.BETWEEN

    # --- what cannot be drained ----------------------------------------------------------------------------------

    def disturbed(self) -> bool:
        """Tell whether the script may go astray now because a peer was lost."""
        return not self.rehearsing and not self._released and (self.interrupted or self.registry.step_failed)

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
        self._script_failure.note(why, self.session.step)
        self._script_failure.tell(self._link.orders.epoch, attached=self._epoch)

    def leave(self) -> tuple[int, list[int]]:
        """Take down what this run of the script made: another begins. Returns the steps done and the versions held."""
        self.session.capture_interval = self.snapshots.interval
        self.session.store_host, self.session.store_port = self._store_address
        self.close()
        backend.uninstall(self.registry)
        held: list[int] = list(self._rank_entry.held)
        self._rank_entry.clear(keep_slots=True)
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
        self._rank_entry.phase = Phase.RESTORING
        self.snapshots.restore(version)
        self.snapshots.tell_buckets(self.registry)
        self.practising = False
        self.completed = self._live = version
        self._rank_entry.completed = version
        self._rank_entry.phase = Phase.BETWEEN
        rehearsal_output.lift()
        self._seal()

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Stay until every rank's last snapshot is committed; False if a repair is needed first."""
        self._seal()
        self.snapshots.wait(hurry=False)  # what was given up once is never committed, though it is captured after all
        if self.completed not in self.snapshots.held():
            self.snapshots.capture_now(self.completed)
        self._rank_entry.phase = Phase.FINISHED
        self._link.send(messages.Finished(self.completed))
        self._released = self._link.orders.wait_release(self._epoch)
        return self._released

    def close(self) -> None:
        """Free groups and mappings; the process is about to end."""
        self._hook.remove()
        self._wrappers.close()
        self.registry.shut_down()
        self.snapshots.close()
