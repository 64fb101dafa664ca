"""Messages between workers and agent, and those that the agent passes on to the coordinator."""

import os
import subprocess
import typing
from signal import SIGKILL
from types import SimpleNamespace

import pytest
from kit.orders import assign
from msgspec.structs import replace

from deadpool_run.agent.processes.children import Exit
from deadpool_run.agent.processes.workers import Workforce, _Worker
from deadpool_run.core.effects import AbortStep, SetCaptureInterval
from deadpool_run.core.events import SetupCompleted, WorkerExited
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Rank, Version, WorkerId
from deadpool_run.wire import messages


def test_a_captured_snapshot_is_for_the_agent_and_no_fact():
    facts, captured = [], []
    workforce = Workforce(None, facts.append, lambda _: (), lambda *what: captured.append(what))
    workforce._workers[WorkerId(3)] = _Worker(None, rank=Rank(1))
    workforce._handle(WorkerId(3), messages.Captured(7))
    workforce._handle(WorkerId(3), SetupCompleted(messages.THIS_WORKER))
    assert captured == [(Rank(1), Version(7))]
    assert facts == [SetupCompleted(WorkerId(3))]


SAMPLES = {"worker": messages.THIS_WORKER, "captured": (4, 5), "live": None, "step": None, "blame": "script"}


@pytest.mark.parametrize("kind", typing.get_args(messages.WorkerReport))
def test_every_report_of_a_worker_is_a_fact_about_it(kind):
    facts = []
    workforce = Workforce(None, facts.append, lambda _: (), None)
    report = kind(**{name: SAMPLES.get(name, 6) for name in kind.__struct_fields__})
    workforce._handle(WorkerId(7), report)
    assert facts == [replace(report, worker=WorkerId(7))]


@pytest.mark.parametrize("kind", [*typing.get_args(messages.ToWorker), *typing.get_args(messages.FromStore)])
def test_no_worker_says_what_agents_and_stores_say(kind):
    workforce = Workforce(None, lambda _: None, lambda _: (), None)
    with pytest.raises(ProtocolError, match=kind.__name__):
        workforce._handle(WorkerId(7), kind(*([None] * len(kind.__struct_fields__))))


def test_an_abandoned_worker_ends_once():
    facts = []
    workforce = Workforce(None, facts.append, lambda rank: (Version(rank + 4),), None)
    workforce._workers[WorkerId(3)] = _Worker(None, rank=Rank(1))
    workforce.abandon(WorkerId(3))
    workforce.abandon(WorkerId(3))
    workforce._ended(WorkerId(3), Exit(None, SIGKILL))  # in the end
    assert facts == [WorkerExited(WorkerId(3), None, SIGKILL, (Version(5),))]


def test_a_worker_is_bound_to_cpus():
    workforce = Workforce(None, lambda _: None, lambda _: (), None)
    cpus = os.sched_getaffinity(0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        workforce._workers[WorkerId(3)] = _Worker(SimpleNamespace(process=SimpleNamespace(pid=child.pid)))
        workforce.bind(WorkerId(3), {min(cpus)})
        workforce.bind(WorkerId(4), {max(cpus)})  # it has ended
        assert os.sched_getaffinity(child.pid) == {min(cpus)}
        child.stdin.close()
    assert os.sched_getaffinity(0) == cpus


class Recorder:
    """A channel that records what is sent."""

    def __init__(self):
        self.messages = []

    def send(self, message, fds=()):
        self.messages.append((message, list(fds)))


def test_what_is_for_the_owner_of_a_rank_waits_until_it_has_it():
    """An agent brings a replacement's transcript before it gives the rank away, and the next loss does not wait for that."""
    workforce, channel, worker = Workforce(None, lambda _: None, lambda _: (), None), Recorder(), WorkerId(3)
    workforce._workers[worker] = _Worker(SimpleNamespace(channel=channel))
    workforce.expect_rank(worker)
    workforce.send(worker, AbortStep(worker, 3))
    workforce.send(worker, SetCaptureInterval(worker, 4))
    assert channel.messages == []
    order = assign(fds=("slot0",))
    workforce.assign(worker, order, {"slot0": 9})
    workforce.send(worker, AbortStep(worker, 4))
    later = [AbortStep(worker, 3), SetCaptureInterval(worker, 4), AbortStep(worker, 4)]
    assert channel.messages == [(order, [9]), *((message, []) for message in later)]


def test_the_end_of_the_job_reaches_who_still_waits_for_a_rank():
    workforce, channel, worker = Workforce(None, lambda _: None, lambda _: (), None), Recorder(), WorkerId(3)
    workforce._workers[worker] = _Worker(SimpleNamespace(channel=channel))
    workforce.expect_rank(worker)
    workforce.send(worker, messages.Stop())
    workforce.send(worker, messages.ExitNow(3))
    assert channel.messages == [(messages.Stop(), []), (messages.ExitNow(3), [])]
