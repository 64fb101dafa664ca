"""One seed, one job: the real core against simulated workers, with faults as data. A wrong decision raises.

Safety is asserted by the workers (they obey nothing of an old epoch, are asked for nothing that they do not hold, train
on the same content) and after every decision; liveness by bounds in simulated time.
"""

import itertools
import random
from dataclasses import dataclass

from machine import Clock, Vault
from workers import Gathering, Mode, Worker

from deadpool_run.core import coordinator, faults, pool, timers
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.lifecycle import JobPhase, MemberPhase
from deadpool_run.core.settings import Settings
from deadpool_run.ids import Rank

KINDS = (
    *(
        "kill rank",
        "kill rank",
        "kill rank",
        "kill rank",
        "inject",
        "freeze rank",
        "raise",
        "kill parked",
        "freeze parked",
    ),
    *("suspect", "drain", "attach", "start"),
)
REPAIR_TIMEOUT_S = 5.0
HANG_CHECK_S = 2.0
BOUND_S = 30.0
"""After the last fault (or the last worker that was ended for one), the job is at work again within this."""
HORIZON_S = 2000.0


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    whom: int = 0
    """Taken modulo the candidates."""


class Simulation:
    def __init__(self, seed: int, settings: Settings, planned: tuple[Fault, ...], steps: int = 40) -> None:
        self.rng = random.Random(seed)
        self.settings, self.steps = settings, steps
        self.clock, self.vault, self.gathering = Clock(), Vault(settings.world_size), Gathering(self)
        self.tokens = itertools.count(1)
        self.state = coordinator.new_state(settings)
        self.workers: dict[int, Worker] = {}
        self.ranks: dict[int, int] = {}
        """What the agent knows of who was given which rank."""
        self.breaks: set[str] = set()
        self.reported_dead: set[int] = set()
        self.troubled_at = 0.0
        self.rank_faults = self.parked_faults = self.setup_faults = 0
        self.asked_to_stop = False
        self.stopped: do.StopJob | None = None
        self.log: list[str] = []
        for fault in planned:
            self.clock.at(fault.at, lambda fault=fault: self.inject(fault))
        self.clock.after(HANG_CHECK_S, self.check_hangs)
        self.tell(ev.JobSubmitted())

    def run(self) -> do.StopJob:
        """Run to the end of the job. Raises AssertionError, with the last of the log, for whatever must not be."""
        try:
            while self.stopped is None:
                self.advance()
                self.check_liveness()
            self.check_end()
        except AssertionError as error:
            tail = "\n".join(self.log[-60:])
            raise AssertionError(f"{error}\n{tail}") from error
        return self.stopped

    def advance(self) -> None:
        deadline, event = coordinator.next_deadline(self.settings, self.state), self.clock.next()
        if deadline is not None and (event is None or deadline <= event):
            self.clock.now = max(self.clock.now, deadline)
            self.tell(ev.TimeAdvanced())
            after = coordinator.next_deadline(self.settings, self.state)
            assert after is None or after > self.clock.now, "time stands still"
        else:
            assert event is not None, "nothing will ever happen again"
            self.clock.run_next()

    # --- the agent -----------------------------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        if self.stopped is not None:
            return
        if isinstance(event, (ev.WorkerExited, ev.WorkerStartFailed)):
            self.reported_dead.add(event.worker)
        before = self.state
        self.state, effects = coordinator.step(self.settings, before, event, self.clock.now)
        self.log.append(f"{self.clock.now:8.3f} {event}")
        self.log += [f"             -> {effect}" for effect in effects]
        coordinator.check_invariants(self.settings, self.state)
        assert self.state.epoch >= before.epoch, "an epoch fell"
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: do.Effect) -> None:
        match effect:
            case do.BeginGeneration():
                assert all(w.rank is None or not w.alive for w in self.workers.values()), "the old world still lives"
                self.vault.clear()
            case do.StartWorker():
                assert effect.worker not in self.workers, "a worker's number was given again"
                worker = self.workers[effect.worker] = Worker(self, effect.worker)
                worker.start()
            case do.AssignRank():
                self.check_assignment(effect)
                self.ranks[effect.worker] = effect.rank
                self.send(effect)
            case do.AttachGroups():
                self.check_all_restored(effect)
                self.send(effect)
            case do.KillWorker():
                self.troubled_at = self.clock.now
                worker = self.workers[effect.worker]
                self.clock.after(self.rng.uniform(0.0, 0.1), lambda: worker.die(signal=9))
            case do.TerminateWorker():
                worker = self.workers[effect.worker]
                grace = effect.grace_s if worker.frozen else self.rng.uniform(0.0, 0.5)
                self.clock.after(grace, lambda: worker.die(signal=effect.signal))
            case do.StopJob():
                self.stopped = effect
            case do.SetCaptureInterval() | do.Announce() | do.ReportIncident():
                pass
            case _:
                self.send(effect)

    def send(self, effect: do.Effect) -> None:
        worker = self.workers[effect.worker]
        worker.down.send(lambda: worker.obey(effect))

    def check_hangs(self) -> None:
        """The agent's health check, which knows whom the others wait for."""
        if self.state.phase in (JobPhase.UNPROTECTED, JobPhase.RUNNING, JobPhase.FINISHING):
            for worker in list(self.workers.values()):
                if worker.alive and worker.frozen and worker.number in self.ranks:
                    self.tell(ev.WorkerHung(worker.number, "no progress"))
        self.clock.after(HANG_CHECK_S, self.check_hangs)

    # --- faults --------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        alive = [w for w in self.workers.values() if w.alive and not w.frozen and not w.raising]
        parked = fault.kind in ("kill parked", "freeze parked")
        wanted = [w for w in alive if (w.mode in (Mode.STARTING, Mode.PARKED)) == parked and w.mode is not Mode.LEAVING]
        if fault.kind == "stop":
            self.asked_to_stop = True
            self.tell(ev.StopRequested(15))
        elif fault.kind == "start":
            self.breaks.add("start")
            self.parked_faults += 1
        elif wanted:
            self.strike(fault, wanted[fault.whom % len(wanted)])
        self.troubled_at = self.clock.now
        self.log.append(f"{self.clock.now:8.3f} !! {fault}")

    def strike(self, fault: Fault, worker: Worker) -> None:
        if fault.kind.endswith("parked"):
            self.parked_faults += 1
        elif self.state.phase in (JobPhase.UNPROTECTED, JobPhase.FINISHING) or worker.mode is Mode.FINISHED:
            self.setup_faults += 1
        self.rank_faults += 1
        match fault.kind:
            case "kill rank" | "kill parked":
                worker.die(signal=9)
            case "freeze rank" | "freeze parked":
                worker.frozen = True
                self.gathering.leave(worker)
            case "inject":
                self.tell(ev.KillRequested(Rank(worker.rank), ev.KillHow.SIGKILL))
            case "raise":
                worker.throw(f"Error{len(self.log)}")
            case "suspect":
                worker.break_collective()
            case "drain" | "attach":
                worker.breaks.add(fault.kind)

    # --- what must hold ------------------------------------------------------------------------------------------

    def check_assignment(self, order: do.AssignRank) -> None:
        assert self.workers[order.worker].mode is not Mode.STARTING, "a worker that is not ready was given a rank"
        for other in self.workers.values():
            if other.number != order.worker and other.rank == order.rank:
                assert other.number in self.reported_dead, f"rank {order.rank} was taken from a living worker"

    def check_all_restored(self, order: do.AttachGroups) -> None:
        """Groups are built by all together, so that each must stand where the others do."""
        owners = {rank: self.workers[number] for number, rank in self.ranks.items() if self.workers[number].alive}
        stands = {(w.epoch, w.mode, w.completed, w.token) for w in owners.values() if not w.frozen and not w.raising}
        assert len(stands) <= 1, f"attaching to epoch {order.epoch}, but the ranks stand at {stands}"

    def check_liveness(self) -> None:
        quiet = self.clock.now - self.troubled_at
        assert self.clock.now < HORIZON_S, "the job never ends"
        if quiet < BOUND_S or self.stopped is not None:
            return
        phase = self.state.phase
        if phase is JobPhase.STARTING and quiet < timers.START_S + BOUND_S:
            return
        assert phase in (JobPhase.UNPROTECTED, JobPhase.RUNNING, JobPhase.FINISHING), f"still {phase} after {quiet:g} s"
        ready = len(self.state.in_phase(MemberPhase.READY))
        crashed = sum(self.clock.now < at + pool.CRASH_WINDOW_S for at in self.state.crashes)
        if phase is JobPhase.RUNNING and crashed < pool.CRASHES:
            assert ready == self.settings.spares, f"{ready} spares are ready, not {self.settings.spares}"

    def check_end(self) -> None:
        assert not any(worker.alive for worker in self.workers.values()), "a worker outlives the job"
        assert self.stopped is not None
        if self.stopped.exit_code == 0:
            assert all(w.completed == self.steps for w in self.workers.values() if w.mode is Mode.LEAVING and w.rank)
            return
        reason = self.stopped.reason
        excuses = {
            "stopped by SIGTERM": self.asked_to_stop,
            "without one completed step": self.rank_faults >= faults.MAX_ATTEMPTS,
            "the world was started again": self.setup_faults + self.parked_faults > self.state.restarts,
            "workers died before they were given a rank": self.parked_faults >= pool.CRASHES,
            "rank ": not self.state.managed,  # a loss before anyone called init()
        }
        assert any(text in reason and excused for text, excused in excuses.items()), f"stopped without need: {reason}"


def planned(rng: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    """Return some faults, often close to one another."""
    at, found = rng.choice((rng.uniform(0.0, 1.5), rng.uniform(1.0, 4.0), rng.uniform(1.0, 4.0))), []
    for _ in range(rng.choice((1, 2, 3, 4, 8))):
        found.append(Fault(at, rng.choice(kinds), rng.randrange(12)))
        at += rng.uniform(0.0, 1.0) if rng.random() < 0.6 else rng.uniform(0.0, 8.0)
    if rng.random() < 0.1:
        found.append(Fault(rng.uniform(0.0, at), "stop"))
    return tuple(found)


def simulation(seed: int, kinds: tuple[str, ...] = KINDS) -> Simulation:
    """Return the job of this seed, with faults of these kinds."""
    rng = random.Random(seed)
    settings = Settings(
        world_size=rng.randint(1, 4),
        spares=rng.randint(0, 2),
        repair_timeout_s=REPAIR_TIMEOUT_S,
        shutdown_timeout_s=3.0,
        calm_s=1.0,
        capture_interval=rng.choice((1, 1, 2, 3)),
    )
    return Simulation(seed, settings, planned(rng, kinds), steps=rng.choice((3, 20, 60)))
