"""Search for schedules of an election that break an invariant: every single fault, then some faults at random."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

from election_digest import digest
from election_model import AUTHORITY, ROLE, Broken, Fault, Host, T, World

from deadpool_run.core.leadership import election, quorum
from deadpool_run.core.leadership import electorate as el
from deadpool_run.ids import NodeId

LONG = (0.3 * T, 0.6 * T, 0.95 * T, 1.1 * T, 1.6 * T, 2.4 * T)
NAMES = tuple(map(NodeId, "habcde"))


def found(nodes: int, *, grow: bool = False, claims: bool = False) -> World:
    """Return a world with a leader `h`, and agents that have just joined, or that all vote already."""
    world = World(claims=claims)
    log = el.LogIndex(0, 1)
    h, *others = NAMES[:nodes]
    world.hosts[h] = Host(election.first_leader(h, T, 0.0, claims=claims), beat_at=0.0)
    world.committed = frozenset({(0, 1)})
    world.handle(h, el.LogFollowed(log))
    configurations = world.hosts[h].agent.configurations
    for other in others:
        world.apply(("join", other, configurations, h))
    if not grow:
        world.run(2 * T)
        assert len(world.hosts[h].agent.configuration.voters) == nodes
    return world


def shrink(nodes: int, *, claims: bool = False) -> World:
    """Return a world that has just lost its last node."""
    world = found(nodes, claims=claims)
    *_, last = world.hosts
    world.apply(("end", last, ("h",)))
    return world


def silent() -> World:
    """Return a world in which three machines have lost sight of their leader, and are about to elect another."""
    world = found(3)
    world.apply(("sleep", ("h",), 1.4 * T))
    world.run(world.now + 0.95 * T)
    return world


def divided() -> World:
    """Return a world whose leader is cut off from one of three, while the other is about to hear of it late."""
    world = found(3)
    world.apply(("cut", (("h", "a"), ("a", "h")), 3 * T))
    world.apply(("hold", (("h", "b"),), 1.1 * T))
    world.run(world.now + 0.95 * T)
    return world


def cut_off() -> World:
    """Return a world whose leader is cut off from both others, just before they elect another."""
    world = found(3)
    world.apply(("cut", (("h", "a"), ("a", "h"), ("h", "b"), ("b", "h")), 3 * T))
    world.run(world.now + 0.7 * T)
    return world


def lagging(*, grows: bool) -> World:
    """Return a world whose leader has just ended, and of which an agent does not know the last change, or the log's end."""
    world = found(3)
    world.apply(("hold", (("h", "a"),), 0.6 * T))
    if grows:
        for node in map(NodeId, "de"):
            world.apply(("join", node, world.hosts[NodeId("h")].agent.configurations, "h"))
    else:
        world.apply(("entry", "h"))
    world.run(world.now + 0.5 * T)
    world.apply(("cut", (("h", "a"),), 0.1 * T))
    world.apply(("end", "h", ()))
    return world


def left_out() -> World:
    """Return a world whose leader has ended while only the voter that it leaves out knows of that."""
    world = shrink(5)
    h = NodeId("h")
    while len(world.hosts[h].agent.configuration.voters) != 3:
        world.run_one()
    four, three = (each.voters for each in world.hosts[h].agent.configurations)
    world.apply(("reset", tuple((h, node) for node in three if node != h)))
    (out,) = set(four) - set(three)
    world.deliver((h, out, "control"))
    world.apply(("end", h, ()))
    return world


def apart() -> World:
    """Return a world of two with an authority, just before they conclude that they hear nothing of each other."""
    world = found(2, claims=True)
    world.apply(("cut", (("h", "a"), ("a", "h")), 1.1 * T))
    world.run(world.now + 0.8 * T)
    return world


def late() -> World:
    """Return a world of two with an authority, in which a heartbeat came late and the next one confirms its answer."""
    world = found(2, claims=True)
    a, h = world.hosts["a"], world.hosts["h"]
    assert len(a.agent.configurations) == 1
    world.run(h.beat_at - 0.0125 * T)
    world.apply(("hold", (("h", "a"),), 0.1875 * T))
    world.run(world.now + 0.2 * T)
    return world


def stood_still() -> World:
    """Return a world in which the others elect a leader while the clock of theirs stands still."""
    world = found(5)
    world.apply(("freeze", "h", 1.1 * T))
    world.run(world.now + 0.25 * T)
    world.apply(("cut", (("h", "a"), ("a", "h")), 1.6 * T))
    world.run(world.now + 0.4 * T)
    return world


STARTS: dict[str, Callable[[], World]] = {
    "three": cache(lambda: found(3)),
    "five": cache(lambda: found(5)),
    "one grows to three": cache(lambda: found(3, grow=True)),
    "one grows to four": cache(lambda: found(4, grow=True)),
    "one grows to five": cache(lambda: found(5, grow=True)),
    "three shrink to two": cache(lambda: shrink(3)),
    "five shrink to three": cache(lambda: shrink(5)),
    "a silent leader": cache(silent),
    "a leader that is heard late": cache(divided),
    "a leader that is cut off": cache(cut_off),
    "a change that is not known": cache(lambda: lagging(grows=True)),
    "an entry that is not known": cache(lambda: lagging(grows=False)),
    "a voter that is left out": cache(left_out),
    "a leader whose clock stood still": cache(stood_still),
    "two with an authority": cache(lambda: found(2, claims=True)),
    "two with an authority, and no link": cache(apart),
    "two with an authority, and a late heartbeat": cache(late),
    "one grows to three with an authority": cache(lambda: found(3, grow=True, claims=True)),
    "three shrink to two with an authority": cache(lambda: shrink(3, claims=True)),
}
MIXES = {
    "closed links": ("order", "end", "reset", "cut", "entry"),
    "pauses": ("order", "sleep", "hold", "entry"),
    "stopped clocks": ("freeze", "sleep", "hold", "cut"),
    "refusals": ("order", "refuse", "cut", "end"),
    "everything": ("order", "end", "reset", "cut", "hold", "sleep", "freeze", "refuse", "entry"),
}
MOST = 6
"""Faults of one schedule, in a long search."""
KINDS = frozenset({"order", "end", "refuse", "entry", "reset", "sleep", "freeze", "all", "hold", "cut"})


def faults(world: World, kinds: frozenset[str]) -> Iterator[Fault]:  # noqa: PLR0912 - one case for each kind
    """Yield what the adversary may do now."""
    alive = [node for node in world.hosts if world.lives(node)]
    awake = [node for node in alive if world.hosts[node].wakes_at is None]
    pairs = list(combinations(alive, 2))
    if "order" in kinds:
        heads = sorted(world.heads())
        if heads:
            yield ("late",)
        for _, link in heads[1:]:
            yield ("swap", link)
    if "end" in kinds and len(alive) > 1:
        for node in alive:
            others = tuple(other for other in alive if other != node)
            yield ("end", node, ())
            yield ("end", node, others)
            if len(others) > 1:
                for other in others:
                    yield ("end", node, (other,))
    if "refuse" in kinds:
        for by, to in pairs:
            yield ("refuse", by, to)
            yield ("refuse", to, by)
    if "entry" in kinds:
        for node in world.leaders():
            yield ("entry", node)
    if "reset" in kinds:
        for one, other in pairs:
            yield ("reset", ((one, other), (other, one)))
    for long in LONG:
        if "sleep" in kinds:
            for node in awake:
                yield ("sleep", (node,), long)
        if "freeze" in kinds:
            for node in awake:
                yield ("freeze", node, long)
        if "all" in kinds and awake == alive and ("sleep", tuple(alive)) not in {fault[:2] for _, fault in world.trace}:
            yield ("sleep", tuple(alive), long)
        for kind in ("hold", "cut"):
            if kind in kinds:
                for one, other in pairs:
                    yield (kind, ((one, other), (other, one)), long)
                    yield (kind, ((one, other),), long)
                    yield (kind, ((other, one),), long)
                for node in alive:
                    others = [other for other in alive if other != node]
                    if world.claims:
                        yield (kind, ((node, AUTHORITY), (AUTHORITY, node)), long)
                        yield (kind, ((AUTHORITY, node),), long)
                    out = tuple((node, other) for other in others)
                    into = tuple((other, node) for other in others)
                    yield (kind, out + into, long)
                    yield (kind, out, long)
                    yield (kind, into, long)


def is_steady(world: World) -> bool:
    """Tell whether nothing of interest is going on."""
    return not any(link[2] == "votes" for link in world.links) and all(
        host.dead
        or (
            host.agent.role in (ROLE.LEADER, ROLE.FOLLOWER, ROLE.FENCED)
            and len(host.agent.configurations) == 1
            and host.agent.lapsed_at is None
        )
        for host in world.hosts.values()
    )


def is_faulty(world: World) -> bool:
    """Tell whether a fault goes on."""
    return bool(world.bad) or any(host.wakes_at is not None for host in world.hosts.values())


@dataclass
class Search:
    """One search, and what it has seen."""

    kinds: frozenset[str]
    horizon: float = 3.5 * T
    seen: set[int] = field(default_factory=set)
    runs: int = 0
    steps: int = 0
    bound: int = 10_000
    """How many states `once` sees at most."""
    calm: bool = False
    """Faults so small that nobody may be lost and no leader replaced."""

    def finish(self, world: World) -> None:
        """Let the faults end. Then somebody leads, if a majority is left."""
        self.runs += 1
        before = world.steps
        if self.calm:
            self._stay_calm(world)
        else:
            left = can_lead(world)
            world.heal()
            until = world.now + 6 * T
            world.run(world.now + 1.2 * T)
            while not world.leaders() and world.next_at() <= until:
                world.run_one()
            if not world.leaders() and left and can_lead(world, left) and not world.excused:
                raise Broken("E: nobody leads")
        self.steps += world.steps - before

    def _stay_calm(self, world: World) -> None:
        world.run(world.now + 4 * T)
        if any(host.lost for host in world.hosts.values()) or not all(map(world.lives, world.hosts)):
            raise Broken("F: a node is lost")
        if world.leaders() != ["h"]:
            raise Broken("F: the leader is another")

    def once(self, start: World, seed: int) -> None:
        """Try single faults at every state, in an order that depends on the seed."""
        path = start.copy()
        end = start.now + self.horizon
        tries = []
        while path.now <= end:
            tries += [(path.copy(), fault) for fault in faults(path, self.kinds)]
            path.run_one()
            self.steps += 1
        random.Random(seed).shuffle(tries)
        for world, fault in tries:
            if len(self.seen) >= self.bound:
                break
            self._follow(world.copy(), fault)

    def _follow(self, world: World, fault: Fault) -> None:
        before = world.steps
        try:
            world.apply(fault)
            while is_faulty(world) and world.next_at() < el.FOREVER:
                if (key := digest(world)) in self.seen:
                    return
                self.seen.add(key)
                world.run_one()
            self.finish(world)
        except Broken as broken:
            raise Broken(f"{broken} at {world.now / T:.4g} T after {world.trace}") from broken
        finally:
            self.steps += world.steps - before

    def walks(self, start: World, seeds: Iterable[int], most: int) -> None:
        """Try some faults at random, once for each seed."""
        for seed in seeds:
            self.walk(start, random.Random(seed), most)

    def walk(self, start: World, rng: random.Random, most: int) -> None:
        """Try some faults at random."""
        world = start.copy()
        end = start.now + self.horizon
        left = rng.randint(1, most)
        kinds = frozenset(kind for kind in sorted(self.kinds) if rng.random() < 0.6) or self.kinds
        eager = rng.choice((0.03, 0.1, 0.3))
        patient = rng.random() < 0.5
        try:
            while (left or (patient and is_faulty(world))) and world.now <= end and world.next_at() < el.FOREVER:
                chance = eager / 3 if is_steady(world) else eager
                if left and rng.random() < chance and (options := list(faults(world, kinds))):
                    by_kind = rng.choice(sorted({str(option[0]) for option in options}))
                    world.apply(rng.choice([option for option in options if option[0] == by_kind]))
                    left -= 1
                    self.seen.add(digest(world))
                else:
                    world.run_one()
            self.finish(world)
        except Broken as broken:
            raise Broken(f"{broken} at {world.now / T:.4g} T after {world.trace}") from broken
        finally:
            self.steps += world.steps - start.steps


def can_lead(world: World, patient: Collection[NodeId] = ()) -> tuple[NodeId, ...]:
    """Return the agents that are left if enough are left to decide, and if they have time enough for it."""
    left = [node for node in world.hosts if world.lives(node)]
    known = [host.agent for node, host in world.hosts.items() if node in (patient or left)]
    if not known:
        return ()
    patient = patient or [
        node for node in left if quorum.fence_at(world.hosts[node].agent) > world.local(node) + 2.5 * T
    ]
    lost = {node for host in world.hosts.values() for node in host.lost}
    patient = [node for node in patient if node not in lost]
    best = max(known, key=lambda agent: agent.configuration.index)
    union = {voter for each in best.configurations for voter in each.voters}
    if world.claims and len(union) == 2 and all(best.me in each.voters for each in best.configurations):
        is_free = world.granted is None or world.granted[0] <= best.term or world.granted[1] in patient
        return tuple(patient) if is_free and best.me in patient else ()
    enough = best.me in patient and all(each.is_majority(patient) for each in best.configurations)
    return tuple(patient) if enough else ()
