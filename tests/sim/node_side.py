"""A simulated agent's part on its node: it obeys the leader's orders, and passes on its workers' reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace
from workers import Worker

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.found import with_discard
from deadpool_run.core.leadership import electorate as el

if TYPE_CHECKING:
    from agents import Agent
    from leaders import Cluster


def obeys(mine: int, theirs: int) -> bool:
    """Tell whether an agent that follows the leader of term `mine` obeys an order of term `theirs`."""
    return mine == theirs


_FOUND_AFTER = {
    do.AbortStep: {"finished": False},
    do.ReEnter: {"reentering": True, "rehearsed": False},
    do.ReleaseWorker: {"released": True},
    do.DismissWorker: {"dismissed": True},
    do.PrepareSpare: {"prepared": True},
}
"""For each order to a worker, the fields of its report to the next coordinator."""


class NodeSide:
    """The part of an agent on its own node."""

    cluster: Cluster
    name: str
    mind: el.Agent
    alive: bool
    fenced: bool
    found: dict[int, ev.WorkerFound]
    discards: tuple[tuple[int, int], ...]

    def send(self, target: str, what: Callable[[Agent], None]) -> None:
        if self.alive:
            self.cluster.net.send(self.name, target, lambda: what(self.cluster.agents[target]))

    def obey(self, effect: do.Effect, term: int, key: tuple[int, int, int], epoch: int) -> None:
        """Carry out an order of the leader of that term."""
        if not self.alive or self.fenced or not obeys(self.mind.term, term):
            return
        self.cluster.note(f"        {self.name} obeys t{term} {effect}")
        cluster, storage = self.cluster, self.cluster.storage
        match effect:
            case do.BeginGeneration():
                assert all(w.rank is None or not w.alive for w in cluster.on(self.name)), "the old world still runs"
                storage.clear_on(self.name, key)
                self.found = {number: found for number, found in self.found.items() if found.alive}
            case do.StartWorker():
                assert effect.worker not in cluster.workers, "a worker's number was used twice"
                worker = cluster.workers[effect.worker] = Worker(cluster, effect.worker, effect.node)
                self.found[effect.worker] = ev.WorkerFound(effect.worker, 1000 + effect.worker)
                worker.start()
            case do.SetBuddies():
                storage.set_buddies_on(self.name, effect.buddies, key, epoch)
            case do.DiscardAbove():
                self.discards = with_discard(self.discards, effect.epoch, effect.version)
                storage.discard_on(self.name, effect.epoch, effect.version)
            case do.ReportReplicas():
                held = tuple(sorted(storage.nodes[self.name].has(effect.rank)))
                self.report(ev.ReplicasReported(self.name, effect.rank, effect.epoch, held))
            case do.KillWorker() | do.TerminateWorker():
                worker = cluster.workers[effect.worker]
                cluster.clock.after(cluster.rng.uniform(0.0, 0.1), lambda: worker.die(signal=9))
            case do.AssignRank():
                cluster.ranks[effect.worker] = effect.rank
                self.know(effect.worker, rank=effect.rank, epoch=effect.epoch)
                cluster.workers[effect.worker].store = cluster.terms[term]
                storage.assign_on(self.name, effect.rank, key, known_there=effect.transcript_from is None)
                self.pass_on(effect)
            case do.AttachGroups():
                storage.attach_on(self.name, cluster.ranks[effect.worker], epoch)
                self.pass_on(effect)
            case do.PrepareSpare() | do.AbortStep() | do.ReEnter() | do.ReleaseWorker() | do.DismissWorker():
                if isinstance(effect, do.ReEnter):
                    cluster.workers[effect.worker].store = cluster.terms[term]
                self.know(effect.worker, **_FOUND_AFTER[type(effect)])
                self.pass_on(effect)
            case _:
                self.pass_on(effect)

    def pass_on(self, effect: do.Effect) -> None:
        worker = self.cluster.workers[effect.worker]
        worker.down.send(lambda: worker.obey(effect))

    def know(self, worker: int, **changes: object) -> None:
        if worker in self.found:
            self.found[worker] = replace(self.found[worker], **changes)

    def said(self, event: ev.Event) -> None:
        """Handle a report or the end of one of the node's workers."""
        match event:
            case ev.WorkerReady():
                self.know(event.worker, ready=True)
            case ev.ScriptInitialized():
                self.know(event.worker, initialized=True)
            case ev.ReplacementRehearsed():
                self.know(event.worker, rehearsed=True)
            case ev.RankRestored():
                self.know(event.worker, reentering=False)
            case ev.FetchFailed():
                self.know(event.worker, prepared=False)
            case ev.LoopFinished():
                self.know(event.worker, finished=True)
            case ev.WorkerExited():
                self.know(event.worker, code=event.code, signal=event.signal)
        self.report(event)

    def report(self, event: ev.Event) -> None:
        if self.alive and not self.fenced:
            term, leader = self.mind.term, self.mind.configuration.leader
            self.send(leader, lambda a: a.told(event, term))
