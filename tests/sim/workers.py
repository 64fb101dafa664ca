"""Simulated workers. They obey orders as real ones do, with random delays, and assert what a real one relies on."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

from machine import Channel

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.errors import Blame
from deadpool_run.ids import Rank

if TYPE_CHECKING:
    from simulator import Simulation


class Mode(Enum):
    STARTING = auto()
    PARKED = auto()
    PREPARING = auto()
    SETTING_UP = auto()
    STEPPING = auto()
    BROKEN = auto()
    """Waits for an abort: a collective or an attach failed."""
    ABORTING = auto()
    ABORTED = auto()
    UNWINDING = auto()
    REHEARSING = auto()
    REHEARSED = auto()
    RESTORING = auto()
    RESTORED = auto()
    ATTACHING = auto()
    HELD = auto()
    """Waits between two steps, at the limit of its steps."""
    FINISHED = auto()
    LEAVING = auto()


class Worker:
    def __init__(self, sim: Simulation, number: int, node: str) -> None:
        self.sim, self.number, self.node = sim, number, node
        self.up, self.down = Channel(sim.clock, sim.rng), Channel(sim.clock, sim.rng)
        self.mode = Mode.STARTING
        self.rank: int | None = None
        self.prepared: int | None = None
        """The rank that it has rehearsed as a hot spare."""
        self.epoch = 0
        """The newest epoch of its orders."""
        self.attached = 0
        """The epoch of its attached groups."""
        self.alive, self.frozen, self.raising = True, False, False
        self.wedged = False
        """Whether it survives signals."""
        self.suspended = False
        """Whether its node's agent has stopped it. Its next actions wait."""
        self.waiting: list[Callable[[], None]] = []
        self.completed, self.token = 0, 0
        self.held_live = True
        """Whether its objects have the state of `completed`."""
        self.to_capture = False
        self.first_step_due = False
        self.has_state = False
        """Whether it holds its rank's state, which makes it a survivor."""
        self.store = ""
        """The node of the store for its set-up."""
        self.breaks: set[str] = set()
        """Faults to come: an abort that raises ("abort"), never ends ("endless") or hangs in C++ ("stuck"), a second run
        of the script that raises ("run"), or a failed attach ("attach")."""
        self.reentered = False
        """Whether it was ordered to re-enter since its last attach."""
        self.limit: int | None = None
        """The version after which it begins no step."""
        self.begun = -1
        """The version after which its newest step began."""
        self.plan = 0

    # --- its process ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        if "start" in self.sim.breaks:
            self.sim.breaks.discard("start")
            self.alive = False
            self.say(ev.WorkerStartFailed(self.number, "no memory"))
            return
        self.say(ev.WorkerStarted(self.number, 1000 + self.number))
        self.then(0.3, self._ready)

    def _ready(self) -> None:
        self.mode = Mode.PARKED
        self.say(ev.WorkerReady(self.number))

    def die(self, code: int | None = None, signal: int | None = None) -> None:
        if not self.alive or self.wedged:
            return
        self.alive = False
        self.sim.gathering.leave(self)
        rank = self.sim.ranks.get(self.number)  # from the agent's record: the order may not have arrived here
        captured = () if rank is None else tuple(sorted(self.sim.storage.held(rank, self.node)))
        self.say(ev.WorkerExited(self.number, code, signal, captured))

    def vanish(self) -> None:
        """End without a report, because the node is lost."""
        self.alive = False
        self.sim.gathering.leave(self)

    def say(self, event: ev.Event) -> None:
        if self.sim.storage.nodes[self.node].alive:
            self.up.send(lambda: self.sim.tell(event))

    def then(self, mean: float, what: Callable[[], None]) -> None:
        """Do something after a while, unless another action replaces it."""
        plan = self.plan

        def run() -> None:
            if self.suspended:
                self.waiting.append(run)
            elif self.alive and not self.frozen and plan == self.plan:
                what()

        self.sim.clock.after(self.sim.rng.uniform(0.1 * mean, 2.0 * mean), run)

    def suspend(self) -> None:
        self.suspended = True

    def resume(self) -> None:
        self.suspended = False
        waiting, self.waiting = self.waiting, []
        for what in waiting:
            what()

    def interrupt(self) -> None:
        self.plan += 1
        self.sim.gathering.leave(self)

    # --- orders --------------------------------------------------------------------------------------------------

    def obey(self, order: do.Effect) -> None:
        """Obey an order that has arrived."""
        if self.suspended:
            self.waiting.append(lambda: self.obey(order))
            return
        if not self.alive or self.frozen:
            return
        match order:
            case do.AssignRank():
                self._assign(order)
            case do.PrepareSpare():
                self._prepare(order)
            case do.AbortStep():
                self._abort(order)
            case do.LimitSteps():
                self._limit(order)
            case do.ReEnter():
                self._reenter(order)
            case do.ResumeFrom():
                self._resume(order)
            case do.AttachGroups():
                self._attach(order)
            case do.ReleaseWorker():
                assert self.mode is Mode.FINISHED, f"released while {self.mode}"
                self._leave()
            case do.DismissWorker() if self.mode is Mode.LEAVING:
                pass  # a later coordinator may repeat it
            case do.DismissWorker():
                assert self.mode in (Mode.PARKED, Mode.PREPARING), f"dismissed while {self.mode}"
                self._leave()

    def _leave(self) -> None:
        self.interrupt()
        self.mode = Mode.LEAVING
        self.then(0.1, lambda: self.die(code=0))

    def _prepare(self, order: do.PrepareSpare) -> None:
        assert self.mode is Mode.PARKED, f"ordered to prepare while {self.mode}"
        self.mode, self.prepared = Mode.PREPARING, order.rank
        source = order.transcript_from
        if source is None:
            self._rehearse_ahead()
        else:
            self.then(0.1, lambda: self._rehearse_ahead() if self._can_reach(source) else self._stay_parked(order))

    def _stay_parked(self, order: do.PrepareSpare) -> None:
        self.mode, self.prepared = Mode.PARKED, None
        self.say(ev.FetchFailed(self.number, order.epoch, order.transcript_from, "no answer"))

    def _rehearse_ahead(self) -> None:
        if (chance := self.sim.rng.random()) < 0.1:
            self.mode = Mode.LEAVING
            refused = ev.JobRefused(self.number, "refused as a spare", 94)
            self.say(refused if chance < 0.05 else ev.PrepareFailed(self.number, "no such file"))
            self.then(0.1, lambda: self.die(code=1))
        else:
            self.then(0.3, self._prepared)

    def _prepared(self) -> None:
        self.mode = Mode.PARKED
        self.say(ev.SparePrepared(self.number))

    def _assign(self, order: do.AssignRank) -> None:
        assert self.mode is Mode.PARKED, f"got a rank while {self.mode}"
        assert order.replacement or self.prepared is None, (
            "a world began with a worker that had rehearsed in the world before"
        )
        self.rank, self.epoch = order.rank, order.epoch
        self.mode = Mode.REHEARSING if order.replacement else Mode.SETTING_UP
        self.has_state = not order.replacement
        source = order.transcript_from
        if self.prepared == order.rank and order.replacement:
            self.then(0.01, self._rehearsed)
        elif source is None:
            self.then(0.1, self._initialized)
        else:
            self.then(0.1, lambda: self._initialized() if self._can_reach(source) else self._no_fetch(source))

    def _can_reach(self, source: str) -> bool:
        return self.sim.storage.reaches(source, self.node)

    def _no_fetch(self, source: str) -> None:
        self.interrupt()
        self.mode = Mode.BROKEN
        self.say(ev.FetchFailed(self.number, self.epoch, source, "no answer"))

    def _initialized(self) -> None:
        self.say(ev.ScriptInitialized(self.number))
        self._at_store(self._set_up)

    def _set_up(self) -> None:
        if self.mode is Mode.REHEARSING:
            self.then(0.3, lambda: self._at_store(self._rehearsed))
        else:
            self.attached = self.epoch
            self.then(0.2, lambda: self.sim.gathering.arrive(self))

    def _at_store(self, what: Callable[[], None]) -> None:
        """Do something that needs the store. Without the store, the worker waits longer than any timeout, or raises."""
        if self.sim.serves_store(self):
            what()
        elif self.sim.rng.random() < 0.05:
            self.throw("DistNetworkError")
        else:
            self.then(0.5, lambda: self._at_store(what))

    def _rehearsed(self) -> None:
        self.mode = Mode.REHEARSED
        self.say(ev.ReplacementRehearsed(self.number, self.epoch))

    def _abort(self, order: do.AbortStep) -> None:
        assert order.epoch > self.epoch, f"aborted into epoch {order.epoch} after {self.epoch}"
        whole = self.mode in (Mode.HELD, Mode.FINISHED) and self.begun < self.completed
        assert whole or order.epoch not in self.sim.moves, "a step is interrupted for a drain"
        self.epoch, self.limit = order.epoch, None
        if self.mode in (Mode.REHEARSING, Mode.UNWINDING):
            return
        if not self.has_state:
            self.interrupt()
            self._rehearsed()
            return
        assert self.mode not in (Mode.PARKED, Mode.SETTING_UP, Mode.LEAVING), f"aborted while {self.mode}"
        stepping = self.mode in (Mode.STEPPING, Mode.BROKEN)  # FINISHED has a snapshot of its last version
        self.interrupt()
        self.mode = Mode.ABORTING
        if stepping and self.sim.rng.random() < 0.2:
            self.held_live = False  # interrupted between two optimizers
        if self.to_capture:
            self._capture(last_chance=True)
        self.then(0.1, self._aborted)

    def _aborted(self) -> None:
        if "endless" in self.breaks or "stuck" in self.breaks:
            return
        if "abort" in self.breaks:
            self.mode = Mode.BROKEN
            self.say(ev.AbortFailed(self.number, self.epoch, "garbage", again="run" not in self.breaks))
            return
        self.mode = Mode.ABORTED
        live = self.completed if self.held_live else None
        captured = tuple(sorted(self.sim.storage.held(self.rank, self.node)))
        self.say(ev.AbortCompleted(self.number, self.epoch, self.completed, live, captured))

    def _reenter(self, order: do.ReEnter) -> None:
        assert order.epoch <= self.epoch, f"ordered to re-enter in epoch {order.epoch}, but is in {self.epoch}"
        assert self.mode in (Mode.ABORTING, Mode.ABORTED, Mode.BROKEN), f"ordered to re-enter while {self.mode}"
        assert not self.reentered, "ordered to re-enter again after a failure"
        self.reentered = True
        self.interrupt()
        if "stuck" in self.breaks:
            return
        self.breaks -= {"abort", "endless"}
        self.mode = Mode.UNWINDING
        self.then(0.1, self._unwound)

    def _unwound(self) -> None:
        self.mode = Mode.REHEARSING
        self.has_state = self.held_live = self.to_capture = False
        captured = tuple(sorted(self.sim.storage.held(self.rank, self.node)))
        self.say(ev.RunUnwound(self.number, self.completed, captured))
        if "run" in self.breaks:
            self.then(0.1, lambda: self.throw("registered twice"))
        else:
            self._initialized()

    def _resume(self, order: do.ResumeFrom) -> None:
        assert order.epoch == self.epoch, f"ordered to resume in epoch {order.epoch}, but is in {self.epoch}"
        assert self.mode in (Mode.ABORTED, Mode.REHEARSED), f"resumed while {self.mode}"
        self.mode = Mode.RESTORING
        self.sim.storage.empty_above(self.rank, order.version, self.node)
        is_live = self.has_state and self.held_live and self.completed == order.version
        if is_live or order.version in self.sim.storage.held(self.rank, self.node):
            assert order.source is None, "ordered to fetch a snapshot that is here"
            self.then(0.1, lambda: self._restored(order.version))
        else:  # from another node, or from this one's copies as a buddy
            self.then(0.2, lambda: self._fetch(order.source or self.node, order.version))

    def _fetch(self, source: str, version: int) -> None:
        if self.sim.storage.fetch(source, self.rank, version, self.node):
            self._restored(version)
        else:
            owed = self._is_counted_on() and self._can_reach(source)
            assert not owed, f"{source} should hold version {version} of rank {self.rank}, but does not"
            self._no_fetch(source)

    def _is_counted_on(self) -> bool:
        """Tell whether the leader's records give it this rank. A node that was given up may obey late."""
        member = self.sim.state.members.get(self.number)
        return member is not None and member.rank == self.rank

    def _restored(self, version: int) -> None:
        if not (self.has_state and self.held_live and self.completed == version):
            held = self.sim.storage.held(self.rank, self.node)
            assert version in held, f"rank {self.rank} shall resume from {version}, but holds {sorted(held)}"
            self.completed, self.token = version, held[version]
        self.has_state = self.held_live = True
        self.to_capture = version not in self.sim.storage.held(self.rank, self.node)
        self.mode = Mode.RESTORED
        self.say(ev.RankRestored(self.number, self.epoch))

    def _attach(self, order: do.AttachGroups) -> None:
        assert order.epoch == self.epoch, f"ordered to attach in epoch {order.epoch}, but is in {self.epoch}"
        assert self.mode is Mode.RESTORED, f"attached while {self.mode}"
        self.mode = Mode.ATTACHING
        self.then(0.05, self._attached)

    def _attached(self) -> None:
        if "attach" in self.breaks or self.sim.is_network_bad():
            self.breaks.discard("attach")
            self.mode = Mode.BROKEN
            self.say(ev.AttachFailed(self.number, self.epoch, "no route"))
            return
        self.attached = self.epoch
        self.reentered = False
        self.first_step_due = True
        self.say(ev.RankAttached(self.number, self.epoch))
        self._next_step()

    # --- training ------------------------------------------------------------------------------------------------

    def _limit(self, order: do.LimitSteps) -> None:
        if order.epoch < self.epoch:
            return
        assert order.epoch == self.attached, f"got a limit in epoch {order.epoch}, but is in {self.attached}"
        self.limit = None if order.version is None else max(order.version, self.begun + 1)
        if self.limit is not None:
            self.say(ev.StepsLimited(self.number, order.epoch, self.limit))
        if self.mode is Mode.HELD:
            self.interrupt()
            self._next_step()

    def _hold(self, tries: int = 0) -> None:
        self.mode = Mode.HELD
        storage, snapshot = self.sim.storage, (self.completed, self.token)
        held = self.completed in storage.held(self.rank, self.node)
        if held or storage.capture(self.rank, snapshot, self.attached, self.node):
            self.to_capture = False
            self.say(ev.StepsLimited(self.number, self.attached, self.completed, reached=True, captured=True))
        elif tries > 1200:
            storage.skip(self.rank, self.completed)
            self.say(ev.StepsLimited(self.number, self.attached, self.completed, reached=True))
        else:
            self.then(0.05, lambda: self._hold(tries + 1))

    def _next_step(self) -> None:
        if self.limit is not None and self.completed >= self.limit:
            self._hold()
            return
        self.begun = min(self.completed, self.sim.steps - 1)
        if self.completed >= self.sim.steps:
            self._finish()
            return
        self.mode = Mode.STEPPING
        self.then(0.05, lambda: self.sim.gathering.arrive(self))

    def _finish(self, tries: int = 0) -> None:
        """Capture the last version. Give up if no slot becomes free for a minute, because no buddy accepts copies."""
        self.mode = Mode.FINISHED
        storage = self.sim.storage
        if self.completed in storage.held(self.rank, self.node) or storage.capture(
            self.rank, (self.completed, self.token), self.attached, self.node
        ):
            self.to_capture = False
            self.say(ev.LoopFinished(self.number, self.completed))
        elif tries > 1200:
            storage.skip(self.rank, self.completed)
            self.say(ev.LoopFinished(self.number, self.completed))
        else:
            self.then(0.05, lambda: self._finish(tries + 1))

    def set_up(self, token: int) -> None:
        """Complete set-up, and capture version 0."""
        self.completed, self.token = 0, token
        self._capture()
        self.say(ev.SetupCompleted(self.number))
        self._next_step()

    def step(self, token: int) -> None:
        """Complete a step, after its last collective."""
        if self.to_capture:
            self._capture(last_chance=True)
        self.completed, self.token = self.completed + 1, token
        self.to_capture = self.completed % self.sim.state.capture_interval == 0
        if self.first_step_due:
            self.first_step_due = False
            self.say(ev.FirstStepCompleted(self.number, self.attached))
        if self.completed == 2:
            self.say(ev.TranscriptCompleted(self.number, Rank(self.rank % 2)))
        self._next_step()
        if self.to_capture and self.mode is Mode.STEPPING and self.sim.rng.random() < 0.5:
            self._capture()

    def _capture(self, *, last_chance: bool = False) -> None:
        """Capture a version during the next step. It may wait for a slot until the version after it is due."""
        if self.sim.storage.capture(self.rank, (self.completed, self.token), self.attached, self.node):
            self.to_capture = False
        elif last_chance:
            self.to_capture = False
            self.sim.storage.skip(self.rank, self.completed)
            self.say(ev.CaptureSkipped(self.number, self.completed))

    # --- faults --------------------------------------------------------------------------------------------------

    def break_collective(self) -> None:
        if self.mode is Mode.STEPPING:
            self.interrupt()
            self.mode = Mode.BROKEN
            self.say(ev.CollectiveFailed(self.number, self.attached, "connection reset"))

    def refuse(self) -> None:
        """Let the worker's library refuse to continue."""
        if self.rank is not None and self.mode is not Mode.LEAVING:
            self.interrupt()
            self.raising = True
            self.sim.refused.append(self.number)
            self.say(ev.JobRefused(self.number, f"refused by {self.number}", 94))
            self.sim.clock.after(0.1, lambda: self.die(code=94))

    def throw(self, kind: str) -> None:
        if self.rank is not None and self.mode is not Mode.LEAVING:
            self.interrupt()
            self.raising = True
            blame = Blame.NOBODY if kind == "DistNetworkError" else Blame.SCRIPT
            self.say(ev.WorkerRaised(self.number, self.completed, kind, "injected", f"Traceback\n{kind}", blame))
            slow = self.sim.rng.random() < 0.3  # an exit handler or a thread delays the end
            self.sim.clock.after(self.sim.rng.uniform(1.0, 15.0) if slow else 0.1, lambda: self.die(code=1))


class Gathering:
    """The collective of a step or of set-up. It completes when all ranks of an epoch arrive, with the same content."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.present: dict[int, dict[int, Worker]] = {}

    def arrive(self, worker: Worker) -> None:
        here = self.present.setdefault(worker.attached, {})
        assert worker.rank not in here, f"rank {worker.rank} is in the collective twice"
        here[worker.rank] = worker
        if len(here) < self.sim.settings.world_size:
            return
        del self.present[worker.attached]
        setting_up = worker.mode is Mode.SETTING_UP
        stands = {(w.completed, w.token, w.mode) for w in here.values()} if not setting_up else {worker.mode}
        assert len(stands) == 1, f"ranks of epoch {worker.attached} train on different content: {stands}"
        token = next(self.sim.tokens)
        for member in here.values():
            member.then(0.02, (lambda m=member: m.set_up(token)) if setting_up else (lambda m=member: m.step(token)))

    def leave(self, worker: Worker) -> None:
        for here in self.present.values():
            if here.get(worker.rank) is worker:
                del here[worker.rank]
