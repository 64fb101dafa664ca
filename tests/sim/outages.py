"""Outages of the nodes of a simulated job, as data: killed processes, power cuts, and cut links."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from agents import T

from deadpool_run.core import events as ev
from deadpool_run.ids import Rank

if TYPE_CHECKING:
    from leaders import Cluster


@dataclasses.dataclass(frozen=True)
class Fault:
    """An outage. `whom` selects nodes, and `kind` is the fault."""

    at: float
    kind: str
    whom: int = 0
    heal_after: float | None = None

    def befall(self, cluster: Cluster) -> None:
        if cluster.stopped is not None:
            return
        cluster.note(f"!! {self}")
        cluster.disturbed_at = cluster.clock.now
        living = [a.name for a in cluster.agents.values() if a.alive and not a.fenced]
        cluster.troubled_at = cluster.clock.now + (self.heal_after or 0.0) + 4 * T
        if not living:
            return
        leader = cluster.leader.name if cluster.leader.name in living else living[0]
        whom = leader if self.kind.endswith("leader") else living[self.whom % len(living)]
        match self.kind.split()[0]:
            case "kill" | "power":
                cluster.done_to.append(whom)
                cluster.end_agent(whom, loud=self.kind.startswith("kill"))
            case "worker":
                alive = [w for w in cluster.workers.values() if w.alive]
                if alive:
                    alive[self.whom % len(alive)].die(signal=9)
            case "cut":
                self.cut(cluster, living, whom)
            case "drain":
                rank = Rank(self.whom % cluster.settings.world_size) if self.kind == "drain rank" else None
                cluster.leader.decide(ev.DrainRequested(rank, whom if rank is None else None))

    def cut(self, cluster: Cluster, living: list[str], whom: str) -> None:
        """Split the living nodes in two, with `whom` in the smaller part, or cut one direction of one node's links."""
        others = [name for name in living if name != whom]
        if "pair" in self.kind and others:
            other = others[self.whom // 3 % len(others)]
            self.cut_pairs(cluster, [(whom, other), (other, whom)])
            return
        part = [whom] if "half" not in self.kind else [whom, *others[: max(0, len(living) // 2 - 1)]]
        rest = [name for name in living if name not in part]
        out = [(a, b) for a in part for b in rest]
        into = [(b, a) for a in part for b in rest]
        pairs = out if "deaf" in self.kind else into if "mute" in self.kind else out + into
        cluster.done_to += part
        cluster.check_covered()
        self.cut_pairs(cluster, pairs)

    def cut_pairs(self, cluster: Cluster, pairs: list[tuple[str, str]]) -> None:
        cluster.net.cut(pairs)
        # The leader stops after T, and the last node that heard it 2 T later. Add late messages, and the end of workers.
        cluster.clock.after(3.6 * T + 0.1, cluster.check_fenced)
        if self.heal_after is not None:
            cluster.clock.after(self.heal_after, lambda: self.heal(cluster, pairs))

    def heal(self, cluster: Cluster, pairs: list[tuple[str, str]]) -> None:
        cluster.note(f"!! healed: {pairs}")
        cluster.net.heal(pairs)
        cluster.disturbed_at = (
            cluster.clock.now
        )  # messages of before the cut arrive, a node that was lost may start a worker
        cluster.gathering.healed()
        cluster.troubled_at = cluster.clock.now + 4 * T

    def leaves_majority(self, cluster: Cluster) -> bool:
        nodes = cluster.settings.nodes + cluster.settings.spare_nodes
        if self.at < 2.5:
            return False  # some nodes have not joined and do not vote yet
        match self.kind.split()[0]:
            case "power":
                return nodes > 2
            case "cut":
                return nodes > 2 and ("half" not in self.kind or nodes % 2 == 1)
        return True

    def leaves_two_halves(self, cluster: Cluster) -> bool:
        nodes = cluster.settings.nodes + cluster.settings.spare_nodes
        return self.at >= 2.5 and "cut half" in self.kind and nodes == 2 and self.heal_after is None


KINDS = (
    *("kill leader", "kill leader", "kill leader", "power leader", "kill any", "power any", "worker", "worker"),
    *(
        "cut leader",
        "cut any",
        "cut half any",
        "cut half leader",
        "cut deaf leader",
        "cut mute leader",
        "cut deaf",
        "cut mute",
    ),
    *("repair, kill leader", "repair, power leader"),
)
MOVES = (
    *("drain rank", "drain any", "drain any", "drain leader"),
    *("drain, kill leader", "drain, power leader", "drain, worker", "drain, cut any"),
)


def planned(rng: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    at = rng.choice((rng.uniform(1.5, 6.0), rng.uniform(0.3, 3.0), rng.uniform(2.0, 5.0)))
    faults = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        heal = rng.choice((None, rng.uniform(0.1, 0.8) * T, rng.uniform(0.8, 4.0) * T))
        kind = rng.choice(kinds)
        if kind.startswith("repair, "):
            faults.append(Fault(at, "worker", rng.randrange(12)))
            at, kind = at + rng.uniform(0.05, 1.0), kind.removeprefix("repair, ")
        elif kind.startswith("drain, "):
            faults.append(Fault(at, rng.choice(("drain rank", "drain any")), rng.randrange(12)))
            at, kind = at + rng.uniform(0.05, 2.0), kind.removeprefix("drain, ")
        faults.append(Fault(at, kind, rng.randrange(12), heal))
        at += rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.0, 1.5), rng.uniform(0.0, 6.0)))
    return tuple(faults)
