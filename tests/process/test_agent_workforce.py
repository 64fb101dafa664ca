"""What workers say to the agent and not to the coordinator."""

import os
import subprocess
from types import SimpleNamespace

from deadpool_run.agent.workforce import Workforce, _Worker
from deadpool_run.core.events import SetupCompleted
from deadpool_run.ids import Rank, Version, WorkerId
from deadpool_run.wire import messages


def test_a_captured_snapshot_is_for_the_agent_and_no_fact():
    facts, captured = [], []
    workforce = Workforce(None, facts.append, lambda _: (), lambda *what: captured.append(what))
    workforce._workers[WorkerId(3)] = _Worker(rank=Rank(1))
    workforce._heard(WorkerId(3), messages.Captured(7))
    workforce._heard(WorkerId(3), messages.SetupDone())
    assert captured == [(Rank(1), Version(7))]
    assert facts == [SetupCompleted(WorkerId(3))]


def test_a_worker_is_bound_to_cpus():
    workforce = Workforce(None, lambda _: None, lambda _: ())
    cpus = os.sched_getaffinity(0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        workforce._workers[WorkerId(3)] = _Worker(process=SimpleNamespace(pid=child.pid))
        workforce.bind(WorkerId(3), {min(cpus)})
        workforce.bind(WorkerId(4), {max(cpus)})  # it has ended
        assert os.sched_getaffinity(child.pid) == {min(cpus)}
        child.stdin.close()
    assert os.sched_getaffinity(0) == cpus
