"""A job whose processes are killed and frozen at random times has the weights of an unfailed run."""

import contextlib
import json
import os
import random
import signal
import threading
from collections import Counter

import pytest
from kit.cluster import Cluster
from kit.processes import marked, thread_names

STEPS = 40
STRUCK_BEFORE = 30
"""No strike from this step on: who dies behind the loop is another matter."""
WAYS = (*[signal.SIGKILL] * 4, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP, signal.SIGSTOP)


class Monkey:
    """Strikes at random, seeded as to whom and how; when it hits is the machine's to say."""

    def __init__(self, job: Cluster, seed: int) -> None:
        self.job = job
        self.dice = random.Random(seed)
        self.frozen: list[int] = []
        self.spares_helpers = False

    def version(self) -> int:
        """The newest state that every rank has told: only a step of all ranks ends a repair."""
        told = Counter[int]()
        for event in self.job.account.of("state"):
            told[event["rank"]] = max(told[event["rank"]], event["version"])
        return min(told.values()) if len(told) == self.job.world_size else 0

    def workers(self) -> list[int]:
        """Every worker that lives, spares as well."""
        whole = (line for line in (self.job.run_dir / "journal.jsonl").read_text().splitlines(keepends=True))
        events = [json.loads(line).get("event", {}) for line in whole if line.endswith("\n")]
        started = {event["pid"] for event in events if event.get("type") == "WorkerStarted"}
        return sorted(started & marked(self.job.mark).keys())

    def helpers(self) -> list[int]:
        """The store and the fork server."""
        others = sorted(marked(self.job.mark).keys() - {self.job.pid} - {*self.workers()})
        return [pid for pid in others if "deadpool-store" in thread_names(pid)] + others

    def strike(self) -> None:
        """Kill or freeze somebody."""
        if not self.spares_helpers and self.dice.random() < 0.2:
            self.spares_helpers = True
            pid, how = self.dice.choice(self.helpers()), signal.SIGKILL
        else:
            pid, how = self.dice.choice(self.workers()), self.dice.choice(WAYS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
            if how is signal.SIGSTOP:
                self.frozen.append(pid)

    def thaw(self) -> None:
        """Let all who were frozen go on."""
        while self.frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.frozen.pop(), signal.SIGCONT)

    def rage(self) -> int:
        """Strike until the training is nearly done; return how often."""
        strikes = 0
        while not self.job.poll() and (before := self.version()) < STRUCK_BEFORE:
            for _ in range(self.dice.choice((1, 1, 2, 3))):  # fewer than a job gives up after
                self.strike()
                strikes += 1
                threading.Event().wait(self.dice.choice((0, 0.01, 0.1, 0.3)) * self.dice.random())
            self.thaw()
            self.job.wait_until(lambda: self.version() > before, f"progress after {before}")
        return strikes


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("layout", "spares"),
    [("ddp-full", "1 hot"), ("fsdp", "2 warm"), ("hsdp", "0 warm"), ("pp", "1 warm"), ("tp", "1 hot")],
)
def test_nothing_makes_it_train_wrongly(cluster, reference, layout, spares, seed):
    expected = reference(layout, STEPS)
    count, mode = spares.split()
    words = ("--layout", layout, "--steps", str(STEPS), "--least-ms", "50")
    job = cluster(*words, spares=int(count), options=("--spare-mode", mode))
    job.wait_event("state", version=3)
    monkey = Monkey(job, seed)
    strikes = monkey.rage()
    assert job.wait_exit() == 0, job.told()
    assert strikes >= 3
    job.account.check_same_as(expected)
    job.check_nothing_left()
