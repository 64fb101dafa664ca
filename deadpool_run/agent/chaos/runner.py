"""Injection of a plan's faults into the leader's job, through the requests of `kill-rank`, and the verdict on the run."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deadpool_run.agent.chaos.plan import ChaosPlan, Draw, PlannedFault
from deadpool_run.agent.chaos.victims import REPAIRED_IN, Victims
from deadpool_run.agent.console import tell
from deadpool_run.agent.tasks import Tasks
from deadpool_run.core.effects import Incident
from deadpool_run.core.injection import KillHow, Slowness
from deadpool_run.errors import RequestRefusedError
from deadpool_run.text import counted
from deadpool_run.view.health import Status

_LOOK_S = 0.05
"""Time between two polls of the job's status while a fault waits."""


@dataclass(slots=True)
class Injection:
    """An injected fault, and the workers with a rank that it hit."""

    workers: frozenset[int]
    """Those that no repair has replaced yet."""
    what: str
    """The kind of fault, as the verdict counts it."""
    generation: int
    spare: bool = False
    """It hit no rank: a spare, or a node without ranks."""
    slow_until: float | None = None
    """On the loop's clock: when a slowed rank is to have its own speed again. Nothing is lost."""

    @property
    def repaired(self) -> bool:
        """Whether every rank that it hit has another worker."""
        return not self.spare and self.slow_until is None and not self.workers

    def is_answered(self, generation: int, now: float) -> bool:
        """Return whether a repair or a restart of the world has followed, or nothing was lost and it is over."""
        if self.slow_until is not None:
            return now >= self.slow_until
        return self.spare or self.repaired or generation > self.generation


class Chaos:
    """One chaos run, in the running loop."""

    def __init__(self, plan: ChaosPlan, ask: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Begin. Faults wait until the job is protected. `ask` answers requests as `coordinator.requests` lists them."""
        self._plan, self._ask = plan, ask
        self.injected: list[Injection] = []
        self._tasks = Tasks(lambda error: tell(f"chaos: no more faults: {error!r}", level="error"))
        tell(f"chaos: {plan.description()}; seed {plan.seed}", event="chaos_planned", seed=plan.seed)
        for number in range(len(plan.faults)):
            self._tasks.start(self._inject_all(number))

    async def _inject_all(self, number: int) -> None:
        fault = self._plan.faults[number]
        first_step = fault.at_step or 0
        await self._running()
        for draw in self._plan.draws(number):
            await asyncio.sleep(draw.wait_s)
            while not self._inject(fault, draw, first_step):  # noqa: ASYNC110 - phases change without an event
                await asyncio.sleep(_LOOK_S)
            first_step = 0

    async def _running(self) -> None:
        while self._ask({"do": "status"}).get("phase") != "running":  # noqa: ASYNC110 - as above
            await asyncio.sleep(_LOOK_S)

    def _inject(self, fault: PlannedFault, draw: Draw, step: int) -> bool:
        """Inject the fault if it is due now. Return whether it was injected."""
        status = self._ask({"do": "status"})
        victims = fault.victims
        # A fault without a phase waits until earlier ones are repaired, so that each is measured on its own.
        may_fail = status.get("phase") in REPAIRED_IN if fault.phase else self._is_calm(status)
        if not (may_fail and victims.reached(status, step) and victims.seen_in(status, fault.phase)):
            return False
        if fault.phase:
            ranks = [rank for rank in status["ranks"] if rank.get("activity") == fault.phase or not victims.drawn]
            status = {**status, "ranks": ranks}
        try:
            chosen = victims.chosen(status, draw.victim)
        except RequestRefusedError:
            return False  # no spare is ready, or the rank's place is empty
        done = [self._kill(each, draw.how, status, victims) for each in chosen]
        return any(done)

    def _is_calm(self, status: Status) -> bool:
        """Return whether the job trains and every injected loss is repaired: detected, and followed by a completed step."""
        generation, now = int(status.get("generation", 0)), asyncio.get_running_loop().time()
        return status.get("phase") == "running" and all(each.is_answered(generation, now) for each in self.injected)

    def _kill(self, victim: Mapping[str, Any], how: KillHow | Slowness, status: Status, target: Victims) -> bool:
        """Inject one fault. Return whether the job took the request."""
        generation = int(status.get("generation", 0))
        if target.agent:
            name, request = (
                f"the agent of node {victim['node']}",
                {"do": "kill-agent", "node": victim["node"], "force": True},
            )
        elif isinstance(how, Slowness):
            name, request = (
                f"rank {victim['rank']}",
                {"do": "slow-rank", "rank": victim["rank"], "factor": how.factor, "for_s": how.for_s},
            )
        elif target.spare:
            name, request = "a spare", {"do": "kill-spare", "worker": victim["worker"], "how": how.value}
        else:
            name, request = f"rank {victim['rank']}", {"do": "kill-rank", "rank": victim["rank"], "how": how.value}
        answer = self._ask(request)
        if "error" in answer:
            return False
        if target.agent:
            hit = (rank["worker"] for rank in status["ranks"] if rank.get("node") == victim["node"])
            workers = frozenset(int(worker) for worker in hit if worker is not None)
            injection = Injection(workers, "agent", generation, spare=not workers)
        elif isinstance(how, Slowness):
            until = asyncio.get_running_loop().time() + how.for_s
            injection = Injection(frozenset(), "slow", generation, slow_until=until)
        else:
            injection = Injection(frozenset({int(answer["worker"])}), how.value, generation, spare=target.spare)
        self.injected.append(injection)
        fault = "sigkill" if target.agent else str(how)
        fate = how.description() if isinstance(how, Slowness) else f"gets {fault}"
        tell(
            f"chaos: {name} {fate}, fault {len(self.injected)}",
            event="fault_injected",
            rank=victim.get("rank"),
            how=fault,
        )
        return True

    def repaired(self, incident: Incident) -> None:
        """Note a repair."""
        replaced = {int(loss.worker) for loss in incident.losses}
        for each in self.injected:
            if not each.spare:
                each.workers -= replaced

    def stop(self) -> None:
        """Inject nothing more."""
        self._tasks.cancel()

    def verdict(self, exit_code: int, generation: int) -> dict[str, Any]:
        """Return the counts of faults and their outcomes. `generation` is the world's generation at the end."""
        slow = [each for each in self.injected if each.slow_until is not None]
        ranks = [each for each in self.injected if not each.spare and each.slow_until is None]
        restarted = sum(not each.repaired and generation > each.generation for each in ranks)
        repaired = sum(each.repaired for each in ranks)
        return {
            "seed": self._plan.seed,
            "injected": len(self.injected),
            "hows": dict(Counter(each.what for each in self.injected)),
            "spares": len(self.injected) - len(ranks) - len(slow),
            "slowed": len(slow),
            "repaired": repaired,
            "restarted": restarted,
            "open": len(ranks) - repaired - restarted,
            "survived": exit_code == 0,
            "exit_code": exit_code,
        }


def verdict_line(verdict: Mapping[str, Any], cost: Mapping[str, float], reason: str) -> str:
    """Return the verdict as a line for the user. `cost` is the entry of that name in the status object."""
    hows = ", ".join(f"{count} {how}" for how, count in sorted(verdict["hows"].items()))
    parts = [f"{counted(verdict['injected'], 'fault')} injected{f' ({hows})' if hows else ''}"]
    for name, text in (
        ("repaired", "repaired in place"),
        ("restarted", "answered by a restart of the world"),
        ("spares", "of spares"),
        ("slowed", "of slow ranks"),
        ("open", "not repaired before the end"),
    ):
        if verdict[name]:
            parts.append(f"{verdict[name]} {text}")
    parts += [
        f"{counted(int(cost['steps_repeated']), 'step')} repeated",
        f"{cost['lost_s']:.1f} s lost",
        f"goodput {100 * cost['goodput']:.1f} %",
    ]
    end = (
        "the run survived" if verdict["survived"] else f"the run ended with exit code {verdict['exit_code']}: {reason}"
    )
    return f"chaos (seed {verdict['seed']}): {', '.join(parts)}; {end}"
