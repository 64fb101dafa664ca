"""A chaos run: its random choices, the times of its faults, and the verdict."""

import asyncio
from itertools import islice

import pytest
from msgspec.structs import replace

from deadpool_run.agent.chaos.plan import ChaosPlan, PlannedFault
from deadpool_run.agent.chaos.runner import Chaos, verdict_line
from deadpool_run.agent.chaos.victims import Victims
from deadpool_run.core.effects import Incident, Loss
from deadpool_run.core.injection import KillHow, Slowness

HOWS = (KillHow.SIGKILL, KillHow.EXIT, KillHow.SIGSEGV)
INCIDENT = Incident(1, (), 10, 1, 0.01, 0.1, 0.1, 0.2, 0.2, 0.3, 0.4)


class Job:
    """A leader whose status is the next one of a list at each request; the last one stays."""

    def __init__(self, *statuses, wanted=1):
        self.statuses, self.wanted = list(statuses), wanted
        self.asked, self.times = [], []
        self.enough = asyncio.Event()

    def answer(self, request):
        if request["do"] == "status":
            return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        self.asked.append((len(self.statuses), request))
        self.times.append(asyncio.get_running_loop().time())
        if len(self.asked) >= self.wanted:
            self.enough.set()
        return {"ok": True, "worker": request.get("worker", 10 + request.get("rank", 0))}


def status(phase="running", *, activity="step", step=5, generation=0, spares=("ready",)):
    ranks = [
        {
            "rank": rank,
            "worker": 10 + rank,
            "pid": 1,
            "node": "n",
            "step": step,
            "activity": activity if rank else "between",
        }
        for rank in range(4)
    ]
    shown = [{"worker": 20 + number, "phase": phase} for number, phase in enumerate(spares)]
    return {"phase": phase, "ranks": ranks, "spares": shown, "generation": generation}


def injected(job, *faults, seed=7):
    """Run a job with faults until it has injected the wanted number of faults."""

    async def run():
        chaos = Chaos(ChaosPlan(faults, seed), job.answer)
        async with asyncio.timeout(30):
            await job.enough.wait()
        chaos.stop()
        return chaos

    return asyncio.run(run())


def test_what_is_drawn_depends_on_the_seed_and_the_number_alone():
    fault = PlannedFault(Victims(drawn=True), HOWS, (1.0, 9.0))

    def drawn(seed, number=0):
        plan = ChaosPlan((fault, fault), seed)
        return [(draw.wait_s, draw.how, draw.victim.random()) for draw in islice(plan.draws(number), 20)]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert drawn(7) != drawn(7, 1)
    assert {how for _, how, _ in drawn(7)} == set(HOWS)
    assert all(1 <= wait_s <= 9 for wait_s, _, _ in drawn(7))


@pytest.mark.parametrize(
    ("fault", "times"),
    [(PlannedFault(Victims(rank=1), at_step=3), 1), (PlannedFault(Victims(rank=1), every_s=(1, 1), count=4), 4)],
)
def test_a_fault_is_injected_as_often_as_it_should(fault, times):
    assert len(list(ChaosPlan((fault,), 7).draws(0))) == times


@pytest.mark.parametrize(
    ("fault", "waits_for"),
    [
        (PlannedFault(Victims(rank=1), at_step=5), status("setting up")),
        (PlannedFault(Victims(rank=1), at_step=5), status("repairing")),
        (PlannedFault(Victims(rank=1), at_step=5), status(step=4)),
        (PlannedFault(Victims(rank=1), at_step=5, phase="optimizer"), status(activity="step")),
        (PlannedFault(Victims(spare=True), at_step=5), status(spares=("starting",))),
    ],
)
def test_a_fault_waits_until_it_is_due(fault, waits_for):
    # Two of them: the first look only waits for protection.
    job = Job(status(), waits_for, waits_for, status(activity="optimizer"))
    if waits_for["phase"] == "setting up":
        job.statuses.pop(0)
    injected(job, fault)
    (left, request), *_ = job.asked
    assert left == 1, "injected too early"
    assert request["do"] == ("kill-spare" if fault.victims.spare else "kill-rank")


def test_a_fault_waits_until_the_one_before_is_answered():
    attached = status()
    attached["ranks"][1]["worker"] = 20  # and no step is completed: the repair is not over
    job = Job(*[status()] * 4, *[attached] * 2, status(generation=1), wanted=2)
    injected(job, PlannedFault(Victims(rank=1), (KillHow.HANG,), at_step=1), PlannedFault(Victims(rank=2), at_step=1))
    (_, first), (left, second) = job.asked
    assert (first["rank"], second["rank"], left) == (1, 2, 1)


def test_a_phase_of_a_repair_is_hit_in_the_repair():
    repairing = status("repairing")
    repairing["ranks"][2]["activity"] = "rehearsal"
    job = Job(*[status()] * 4, repairing, wanted=4)
    injected(job, *[PlannedFault(Victims(drawn=True), at_step=1, phase="rehearsal")] * 4)
    assert {request["rank"] for _, request in job.asked} == {2}


def over_nodes():
    shown = status()
    for rank in shown["ranks"]:
        rank["node"] = f"n{rank['rank'] // 2}"
    shown |= {
        "coordinator": {"node": "n0"},
        "nodes": [{"node": f"n{number}", "name": f"n{number}"} for number in range(3)],
    }
    return shown


def test_the_agent_of_any_node_but_the_leaders_is_killed():
    hit = set()
    for seed in range(20):
        job = Job(over_nodes())
        chaos = injected(job, PlannedFault(Victims(drawn=True, agent=True), at_step=1), seed=seed)
        ((_, request),) = job.asked
        hit.add(request["node"])
        assert (request["do"], request["force"]) == ("kill-agent", True)
        workers = {"n1": {12, 13}, "n2": set()}[request["node"]]
        assert chaos.injected[0].workers == workers
        losses = tuple(Loss(worker - 10, worker, "was lost", injected=True, replacement=20) for worker in workers)
        assert chaos.verdict(0, 0)["open"] == bool(workers)
        for loss in losses:  # one repair for each, and the fault is answered by the last
            assert not chaos.injected[0].repaired
            chaos.repaired(replace(INCIDENT, losses=(loss,)))
        verdict = chaos.verdict(0, 0)
        assert (verdict["hows"], verdict["open"], verdict["repaired"]) == ({"agent": 1}, 0, bool(workers))
    assert hit == {"n1", "n2"}


def test_the_agent_of_a_named_node_may_lead():
    job = Job(over_nodes())
    injected(job, PlannedFault(Victims(node="n0", agent=True), at_step=1))
    assert [request["node"] for _, request in job.asked] == ["n0"]


def test_the_next_fault_waits_until_a_slow_rank_is_slow_no_more():
    job = Job(status(), wanted=2)
    slow = PlannedFault(Victims(rank=1), (Slowness(3.0, 0.3),), at_step=1)
    chaos = injected(job, slow, PlannedFault(Victims(rank=2), at_step=1))
    (_, first), (_, second) = job.asked
    assert first == {"do": "slow-rank", "rank": 1, "factor": 3.0, "for_s": 0.3}
    assert second["rank"] == 2
    assert job.times[1] - job.times[0] >= 0.3
    verdict = chaos.verdict(0, 0)
    assert (verdict["hows"], verdict["slowed"], verdict["open"]) == ({"slow": 1, "sigkill": 1}, 1, 1)


def test_the_verdict_counts_what_became_of_the_faults():
    chaos = injected(
        Job(status(), wanted=2), PlannedFault(Victims(spare=True), at_step=1), PlannedFault(Victims(rank=1), at_step=1)
    )
    open_ = chaos.verdict(1, 0)
    assert (open_["injected"], open_["spares"], open_["open"], open_["survived"]) == (2, 1, 1, False)
    assert chaos.verdict(0, 1)["restarted"] == 1
    chaos.repaired(replace(INCIDENT, losses=(Loss(1, 11, "was killed", injected=True, replacement=20),)))
    verdict = chaos.verdict(0, 0)
    assert (verdict["repaired"], verdict["open"], verdict["survived"]) == (1, 0, True)
    assert chaos.verdict(0, 1)["restarted"] == 0
    cost = {"repairs": 1, "steps_repeated": 1, "lost_s": 0.41, "goodput": 0.975}
    assert verdict_line(verdict, cost, "every rank finished") == (
        "chaos (seed 7): 2 faults injected (2 sigkill), 1 repaired in place, 1 of spares, 1 step repeated, 0.4 s lost, "
        "goodput 97.5 %; the run survived"
    )
    assert verdict_line(open_, cost, "rank 1 raised").endswith(
        "1 not repaired before the end, 1 step repeated, 0.4 s lost, goodput 97.5 %; the run ended with exit code 1: rank 1 raised"
    )
