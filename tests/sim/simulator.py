"""Runs the job of one seed: the real core with simulated workers, and faults as data. A wrong decision raises.

Workers assert safety: no order of an old epoch, no request for a version that they do not hold, the same content on
all ranks. More is asserted after every decision. Liveness is asserted with bounds of simulated time.
"""

import itertools
import random
from dataclasses import dataclass

from kit.invariants import check_invariants
from machine import Clock
from storage import Storage, kept
from workers import Gathering, Mode, Worker

from deadpool_run.core import coordinator, places, timers
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.injection import KillHow
from deadpool_run.core.members import Member
from deadpool_run.core.recovery import blame, shutdown, spare_pool
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.ids import Rank

AT_ONCE = "lose node at once"
"""A node is lost as soon as the world is protected, while copies are slow."""
REPAIR_TIMEOUT_S = 5.0
HANG_CHECK_S = 2.0
BOUND_S = 30.0
"""The longest time from the last fault, or from the end of a worker because of one, until the job trains again."""
HORIZON_S = 2000.0


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    whom: int = 0
    """Selects one of the candidates, modulo their number."""


class Simulation:
    def __init__(self, seed: int, settings: Settings, planned: tuple[Fault, ...], steps: int = 40) -> None:
        self.rng = random.Random(seed)
        self.settings, self.steps = settings, steps
        self.clock, self.gathering = Clock(), Gathering(self)
        self.storage = Storage(self.clock, self.rng, settings.world_size)
        self.tokens = itertools.count(1)
        self.state = coordinator.new_state(settings)
        self.workers: dict[int, Worker] = {}
        self.ranks: dict[int, int] = {}
        """The agent's record of the ranks of its workers."""
        self.breaks: set[str] = set()
        self.reported_dead: set[int] = set()
        self.troubled_at = 0.0
        self.rank_faults = self.parked_faults = self.setup_faults = 0
        self.crashes = 0
        """Parked workers that have died since the last repair that replaced a rank."""
        self.network_bad_until = 0.0
        self.nodes_lost: list[float] = []
        self.uncovered_losses = 0
        self.refusals = 0
        """Copies that nodes refused for lack of memory."""
        self.asked_to_stop = False
        self.moves: set[int] = set()
        """Epochs that began because ranks move, without a loss."""
        self.moved: list[do.Incident] = []
        self.left: list[str] = []
        """Drained nodes that have left."""
        self.refused: list[int] = []
        """Workers whose library refused to continue while they had a rank."""
        self.stopped: do.StopJob | None = None
        self.log: list[str] = []
        for fault in planned:
            self.clock.at(fault.at, lambda fault=fault: self.inject(fault))
        self.clock.after(HANG_CHECK_S, self.check_hangs)
        first, *others = (f"n{at}" for at in range(settings.nodes + settings.spare_nodes))
        for name in others:
            self.clock.after(self.rng.uniform(0.0, 3.0), lambda name=name: self.join(name))
        self.storage.join(first)
        self.tell(ev.JobSubmitted(first, self.place(first)))

    def place(self, name: str) -> ev.Place:
        number, ranks = int(name[1:].split("~", maxsplit=1)[0]), self.settings.ranks_per_node
        return ev.Place(
            name=name,
            failure_domain=f"failure domain{number % 2}" if self.settings.nodes > 2 else "",
            devices=(0, ranks, ranks + 1)[number % 3],
        )

    def join(self, name: str) -> None:
        if self.stopped is None:
            self.storage.join(name)
            self.troubled_at = self.clock.now
            self.tell(ev.NodeJoined(name, self.place(name)))

    def run(self) -> do.StopJob:
        """Run to the end of the job. Raises AssertionError, with the end of the log, after a wrong decision."""
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
            assert event is not None, "no event is left"
            self.clock.run_next()

    # --- the agent -----------------------------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        if self.stopped is not None:
            return
        if isinstance(event, (ev.WorkerExited, ev.WorkerStartFailed)):
            self.reported_dead.add(event.worker)
            self.crashes += self.workers[event.worker].rank is None
        if isinstance(event, ev.NodesLost):
            lost = {loss.node for loss in event.losses}
            self.reported_dead |= {worker.number for worker in self.workers.values() if worker.node in lost}
        epoch = self.state.epoch
        refused = isinstance(event, ev.JobRefused) and self.is_heard(self.state.members.get(event.worker))
        effects = coordinator.step(self.settings, self.state, event, self.clock.now)
        self.log.append(f"{self.clock.now:8.3f} {event}")
        self.log += [f"             -> {effect}" for effect in effects]
        check_invariants(self.settings, self.state)
        assert self.state.epoch >= epoch, "an epoch fell"
        assert not refused or self.state.stop is not None, "the job continues after a refusal"
        for effect in effects:
            self.perform(effect)

    def is_heard(self, member: Member | None) -> bool:
        """Return whether the member's reports count, because it still owns its rank."""
        return member is not None and member.rank is not None and member.phase is not MemberPhase.ENDING

    def perform(self, effect: do.Effect) -> None:  # noqa: PLR0912 - one case for each order
        match effect:
            case do.BeginGeneration():
                assert all(w.rank is None or not w.alive for w in self.workers.values()), "the old world still runs"
                self.storage.clear()
            case do.StartWorker():
                assert effect.worker not in self.workers, "a worker's number was used twice"
                worker = self.workers[effect.worker] = Worker(self, effect.worker, effect.node)
                worker.alive = self.storage.nodes[effect.node].alive
                if worker.alive:
                    worker.start()
            case do.AssignRank():
                self.check_assignment(effect)
                self.ranks[effect.worker] = effect.rank
                node = self.workers[effect.worker].node
                self.storage.assign(effect.rank, node, known_there=effect.transcript_from is None)
                self.send(effect)
            case do.SetBuddies():
                self.check_buddies(effect)
                self.storage.set_buddies(effect.buddies, kept(self.state), self.state.epoch)
                self.watch_commit(self.state.epoch)
            case do.ReportReplicas():
                self.clock.after(self.rng.uniform(0.001, 0.1), lambda: self.report_replicas(effect))
            case do.DiscardAbove():
                self.storage.discard_above(effect.epoch, effect.version)
            case do.AttachGroups():
                self.check_all_restored(effect)
                self.send(effect)
            case do.KillWorker():
                self.troubled_at = self.clock.now
                worker = self.workers[effect.worker]
                in_vain = worker.alive and not worker.frozen and not worker.raising and "re-entering" in effect.reason
                assert not in_vain, f"worker {effect.worker} has re-entered, but its report was ignored"
                self.clock.after(self.rng.uniform(0.0, 0.1), lambda: worker.die(signal=9))
            case do.TerminateWorker():
                worker = self.workers[effect.worker]
                grace = effect.grace_s if worker.frozen else self.rng.uniform(0.0, 0.5)
                self.clock.after(grace, lambda: worker.die(signal=effect.signal))
            case do.AbandonWorker():
                self.troubled_at = self.clock.now
                self.workers[effect.worker].wedged = False
                self.workers[effect.worker].die(signal=9)
            case do.StopJob():
                self.stopped = effect
            case do.AbortStep():
                if self.state.relocation is not None and self.state.relocation.moves_in == effect.epoch:
                    self.moves.add(effect.epoch)
                self.send(effect)
            case do.ReleaseNode():
                needed = bool(self.state.buddies) and self.storage.needs(effect.node, self.state.nodes)
                assert not needed, f"{effect.node} may leave, but other nodes do not have its copies yet"
                self.clock.after(self.rng.uniform(0.0, 0.5), lambda: self.leave(effect.node))
            case do.ReportIncident():
                if effect.incident.planned:
                    self.moved.append(effect.incident)
                    self.watch_commit(self.state.epoch)
                self.crashes = 0 if effect.incident.losses else self.crashes
            case do.SetCaptureInterval() | do.Announce():
                pass
            case _:
                self.send(effect)

    def is_network_bad(self) -> bool:
        return self.clock.now < self.network_bad_until

    def serves_store(self, _worker: Worker) -> bool:
        """Return True: the coordinator, and with it the store, never moves here."""
        return True

    def send(self, effect: do.Effect) -> None:
        worker = self.workers[effect.worker]
        worker.down.send(lambda: worker.obey(effect))

    def report_replicas(self, order: do.ReportReplicas) -> None:
        node = self.storage.nodes[order.node]
        if node.alive:
            self.tell(ev.ReplicasReported(order.node, order.rank, order.epoch, tuple(sorted(node.has(order.rank)))))

    def watch_commit(self, epoch: int) -> None:
        """Report the first safe version, as the leader's agent does."""
        awaited = not self.state.committed or self.state.closed != self.state.released
        if self.stopped is None and self.state.epoch == epoch and awaited:
            if self.storage.is_protected():
                self.tell(ev.SnapshotCommitted(self.storage.committed(), epoch))
            if self.state.closed or not self.storage.is_protected():
                self.clock.after(0.02, lambda: self.watch_commit(epoch))

    def check_hangs(self) -> None:
        """Report hung workers, as the agent's hang detector does."""
        if self.state.phase in (JobPhase.SETTING_UP, JobPhase.RUNNING, JobPhase.FINISHING):
            for worker in list(self.workers.values()):
                if worker.alive and worker.frozen and worker.number in self.ranks:
                    self.tell(ev.WorkerHung(worker.number, "no progress"))
        self.clock.after(HANG_CHECK_S, self.check_hangs)

    # --- faults --------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        if fault.kind == AT_ONCE and self.state.phase in (JobPhase.STARTING, JobPhase.SETTING_UP):
            self.clock.after(0.005, lambda: self.inject(fault))
            return
        alive = [w for w in self.workers.values() if w.alive and not w.frozen and not w.raising]
        parked = fault.kind in ("kill parked", "freeze parked")
        waiting = (Mode.STARTING, Mode.PARKED, Mode.PREPARING)
        wanted = [w for w in alive if (w.mode in waiting) == parked and w.mode is not Mode.LEAVING]
        if fault.kind == "stop":
            self.asked_to_stop = True
            self.tell(ev.StopRequested(15))
        elif fault.kind.startswith("lose node"):
            self.lose_nodes(fault, 2 if fault.kind == "lose nodes" else 1)
        elif fault.kind == "drain rank":
            self.tell(ev.DrainRequested(rank=Rank(fault.whom % self.settings.world_size)))
        elif fault.kind == "drain node":
            self.tell(ev.DrainRequested(node=sorted(self.state.nodes)[fault.whom % len(self.state.nodes)]))
        elif fault.kind == "start":
            self.breaks.add("start")
            self.parked_faults += 1
        elif wanted:
            self.strike(fault, wanted[fault.whom % len(wanted)])
        self.troubled_at = self.clock.now
        self.log.append(f"{self.clock.now:8.3f} !! {fault}")

    def leave(self, name: str) -> None:
        """Let a drained node leave. Nothing is lost with it."""
        if name in self.state.nodes and self.stopped is None:
            assert not any(w.alive and w.rank is not None for w in self.workers.values() if w.node == name)
            self.storage.lose(name)
            self.left.append(name)
            for worker in self.workers.values():
                if worker.node == name:
                    worker.vanish()
            self.tell(ev.NodeLost(name, "it has left"))

    def lose_nodes(self, fault: Fault, count: int) -> None:
        """Cut the power of nodes. All losses are found together, at once or after a while. Other nodes may join."""
        alive = [node for node in self.storage.nodes.values() if node.alive]
        if len(self.storage.nodes) == 1 or not alive:
            return
        first = fault.whom % len(alive)
        lost = (alive[first:] + alive[:first])[:count]
        self.uncovered_losses += not self.is_covered({node.name for node in lost})
        for node in lost:
            self.storage.lose(node.name)
            self.nodes_lost.append(self.clock.now)
            for worker in self.workers.values():
                if worker.node == node.name:
                    worker.vanish()
        if self.state.phase is not JobPhase.RUNNING:
            self.setup_faults += 1
        self.rank_faults += 1
        found = ev.NodesLost(tuple(ev.NodeLost(node.name, "power") for node in lost))
        self.clock.after(self.rng.choice((0.0, 0.05, 2.0)), lambda: self.tell(found))
        for node in lost:
            if self.rng.random() < 0.5:
                name = f"{node.name}~{len(self.storage.nodes)}"
                self.clock.after(self.rng.uniform(2.5, 8.0), lambda name=name: self.join(name))

    def strike(self, fault: Fault, worker: Worker) -> None:
        if fault.kind.endswith("parked"):
            self.parked_faults += 1
        elif self.state.phase in (JobPhase.SETTING_UP, JobPhase.FINISHING) or worker.mode is Mode.FINISHED:
            self.setup_faults += 1
        self.rank_faults += 1
        match fault.kind:
            case "kill rank" | "kill parked":
                worker.die(signal=9)
            case "freeze rank" | "freeze parked" | "wedge rank":
                worker.frozen, worker.wedged = True, fault.kind == "wedge rank"
                self.gathering.leave(worker)
            case "inject":
                self.tell(ev.KillRequested(Rank(worker.rank), KillHow.SIGKILL))
            case "raise":
                worker.throw(f"Error{len(self.log)}")
            case "refuse":
                worker.refuse()
            case "bad network":
                self.network_bad_until = self.clock.now + self.rng.uniform(1.0, 20.0)
                worker.break_collective()
            case "suspect":
                worker.break_collective()
            case "abort" | "attach" | "endless" | "stuck":
                worker.breaks.add(fault.kind)
            case "run":
                worker.breaks |= {"abort", "run"}

    # --- what must hold ------------------------------------------------------------------------------------------

    def check_assignment(self, order: do.AssignRank) -> None:
        assert self.workers[order.worker].mode is not Mode.STARTING, "a worker that is not ready got a rank"
        for other in self.workers.values():
            if other.number != order.worker and other.rank == order.rank:
                assert other.number in self.reported_dead, f"rank {order.rank} was taken from a living worker"

    def check_buddies(self, order: do.SetBuddies) -> None:
        for rank, holders in enumerate(order.buddies):
            home = self.state.seats[rank].node
            assert home not in holders, f"the copies of rank {rank} are on the rank's node"
            assert set(holders) <= set(self.state.nodes), "copies are sent to a lost node"

    def check_all_restored(self, order: do.AttachGroups) -> None:
        """Assert that all ranks have the same epoch, phase and content before they attach."""
        owners = {rank: self.workers[number] for number, rank in self.ranks.items() if self.workers[number].alive}
        stands = {(w.epoch, w.mode, w.completed, w.token) for w in owners.values() if not w.frozen and not w.raising}
        assert len(stands) <= 1, f"attaching to epoch {order.epoch}, but the ranks differ: {stands}"

    def check_liveness(self) -> None:
        quiet = self.clock.now - max(self.troubled_at, self.network_bad_until)
        assert self.clock.now < HORIZON_S, "the job never ends"
        if quiet < BOUND_S or self.stopped is not None:
            return
        phase = self.state.phase
        patient = phase is JobPhase.STOPPING or quiet < shutdown.UNREAPED_S + BOUND_S
        if patient and any(worker.wedged for worker in self.workers.values()):
            return  # such a worker is killed, again when the job stops, and then left
        frozen_spare = any(w.alive and w.frozen and w.mode is Mode.PREPARING for w in self.workers.values())
        if (phase is JobPhase.STARTING or frozen_spare) and quiet < timers.START_S + BOUND_S:
            return  # a spare that may take the rank is replaced if it is not ready by then
        if len(self.state.nodes) < self.settings.nodes:
            return  # it waits for a node, or stops: check_end checks the reason
        assert phase in (JobPhase.SETTING_UP, JobPhase.RUNNING, JobPhase.FINISHING), f"still {phase} after {quiet:g} s"
        ready = len(self.state.in_phase(MemberPhase.READY, MemberPhase.PREPARING))
        crashing = any(places.is_crashing(self.state, node, self.clock.now) for node in self.state.nodes)
        if phase is JobPhase.RUNNING and not crashing:
            room = sum(spare_pool.capacity(self.settings, self.state, node) for node in self.state.nodes)
            spare = room - self.settings.world_size
            assert ready == spare, f"{ready} spares are ready, not {spare}"

    def check_end(self) -> None:
        left = [worker for worker in self.workers.values() if worker.alive and not worker.wedged]
        assert not left, "a worker has outlived the job"
        assert self.stopped is not None
        if self.stopped.exit_code == 0:
            assert all(w.completed == self.steps for w in self.workers.values() if w.mode is Mode.LEAVING and w.rank)
            return
        reason = self.stopped.reason
        assert (self.stopped.exit_code == 94) == reason.startswith("refused by "), "the exit code is not the refusal's"
        assert "as a spare" not in reason, "a spare without a rank stopped the job"
        excuses = {
            "stopped by SIGTERM": self.asked_to_stop,
            "refused by": bool(self.refused),
            "without one completed step": self.rank_faults >= blame.MAX_ATTEMPTS,
            "the world was started again": self.setup_faults + self.parked_faults > self.state.restarts,
            "workers died before they were given a rank": self.crashes >= places.CRASHES,
            "in a row were not ready in time": self.parked_faults >= places.NEVER_READY,
            "rank ": not self.state.managed,  # a loss before anyone called init()
            "lost: power": not self.state.managed,
            "and no other came": len(self.nodes_lost) + len(self.left) > self.settings.spare_nodes,
            "no place is left": len(self.nodes_lost) + len(self.left) > self.settings.spare_nodes,
            "no version is held by every rank": self.uncovered_losses > 0 and not self.settings.durable,
        }
        assert any(text in reason and excused for text, excused in excuses.items()), f"stopped without need: {reason}"

    def is_covered(self, lost: set[str]) -> bool:
        """Tell whether the job survives the loss of these nodes: no node is lost now, and others have a version for all ranks.

        They must have one as soon as the job runs, if there are no more losses than copies.
        """
        dead = {node.name for node in self.storage.nodes.values() if not node.alive}
        found = self.state.phase is JobPhase.RUNNING and not dead & set(self.state.nodes)
        is_first = not (self.nodes_lost or self.refusals or self.left or self.state.closed)
        must_have = is_first and len(lost) <= min(self.settings.replicas, len(self.storage.nodes) - 1)
        return found and (must_have or self.storage.have_all(lost))
