"""PyTorch's own tests of torch.distributed (`DistributedTest`), run one after the other on one world of live processes.

PyTorch starts new processes for each of its tests. Here a world runs all of them, and only a test that fails, or leaves
its world unusable, costs a new one: minutes become seconds, and groups that were attached again can be tested as well.
"""

import gc
import importlib
import os
import traceback
import unittest
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from kit.world import TIMEOUT, World
from torch.distributed import distributed_c10d as c10d

from deadpool_run.worker.groups.backend import uninstall
from deadpool_run.worker.groups.registry import GroupState

MODULE = "torch.testing._internal.distributed.distributed_test"
COLLECTIVE_TIMEOUT = timedelta(seconds=20)
LIMIT_S = 240.0
MEETING_TIMEOUT = timedelta(seconds=60)
MEETINGS = 20
"""More than there are meetings in a test."""
LOST = 1
"""The rank that is killed and replaced."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test on one rank. `aborted`: one of our registries took something for the loss of a peer."""

    kind: str
    error: str = ""
    aborted: bool = False
    trace: str = field(default="", compare=False)


class Suite:
    """The tests of this process's rank in its world; `folder` is where they meet through files."""

    def __init__(self, member, backend, folder):
        self.member, self.backend = member, backend
        self.phase = ""
        self.name = ""
        self.meetings = 0
        for name in ("barrier", "test_dir"):
            (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        # The tests choose by this name what to skip, and name it where they make groups: they see what a script sees.
        os.environ |= {
            "BACKEND": "gloo",
            "WORLD_SIZE": str(member.size),
            "RANK": str(member.rank),
            "TEMP_DIR": str(folder),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
        module = importlib.import_module(MODULE)
        self.seed = importlib.import_module("torch.testing._internal.common_utils").set_rng_seed
        suite = self

        class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
            rank = member.rank

            def _barrier(self, *_args, wait_for=None, **_kwargs):
                suite.meet_within(wait_for)

        self.tests = Tests
        self.names = sorted(name for name in dir(module.DistributedTest._DistTestBase) if name.startswith("test"))

    def meet(self, where, count=None):
        """Wait for every rank. A rank that is late is waited for longer than any collective is."""
        met = f"{self.phase}/{where}"
        if self.member.store.add(f"{met}/came", 1) == (count or self.member.size):
            self.member.store.set(met, "1")
        self.member.store.wait([met], MEETING_TIMEOUT)

    def meet_within(self, count):
        """Wait for every rank in the midst of a test."""
        self.meetings += 1
        self.meet(f"{self.name}/{self.meetings}", count)

    def start(self, *, attached=True):
        """Become a member of the world."""
        member = self.member
        if self.backend == "deadpool":
            member.start(attached=attached, timeout=COLLECTIVE_TIMEOUT)
            return
        store = dist.PrefixStore(f"{member.prefix}/torch", member.store)
        dist.init_process_group(
            self.backend, store=store, rank=member.rank, world_size=member.size, timeout=COLLECTIVE_TIMEOUT
        )

    def run(self, phase, renew):
        """Run every test; return the outcomes by name. `renew` makes the world of the next test."""
        self.phase = phase
        found = {}
        for number, name in enumerate(self.names):
            self.name, self.meetings = name, 0
            found[name] = outcome = self._run_one(name)
            key = f"{phase}/used/{name}"
            if outcome.kind != "skipped":
                self.member.store.set(key, "1")
            self.meet(f"end {name}")
            if self.member.store.check([key]):
                renew(f"{phase}{number}")
                self.meet(f"renewed {name}")
        return found

    def _run_one(self, name):
        registry = self.member.registry
        registry.begin_step()
        self.seed()
        kind, error, trace = self._perform(name)
        intact = registry.state is GroupState.ATTACHED and not registry.step_failed and not self.member.failures
        aborted = self.backend == "deadpool" and kind != "fails" and not intact
        return Outcome(kind, error, aborted, trace)

    def _perform(self, name):
        unbound = getattr(self.tests, name)
        if getattr(unbound, "__unittest_skip__", False):  # what a parent process would heed
            return "skipped", unbound.__unittest_skip_why__, ""
        test = self.tests(name)
        try:
            getattr(test, name)()
        except unittest.SkipTest as reason:
            return "skipped", str(reason), ""
        except SystemExit as reason:  # so the decorators tell a parent process
            return "skipped", f"exit code {reason.code}", ""
        except Exception as error:  # noqa: BLE001 - the kind is what is compared
            told = type(error).__name__, traceback.format_exc()
        else:
            return "passes", "", ""
        self._cut()  # here, where no traceback holds a group any more
        return "fails", *told

    def _cut(self):
        """Let go peers that wait for this rank: else only the time-outs of their collectives would."""
        for meeting in range(self.meetings, MEETINGS):
            self.member.store.set(f"{self.phase}/{self.name}/{meeting + 1}", "1")
        if self.backend == "deadpool":
            self.member.registry.abort()
        elif dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def start_anew(self, prefix):
        """Leave the world and start in another one."""
        member = self.member
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.backend == "deadpool":
            uninstall(member.registry)
            member.registry.shut_down()
            member.new_registry()
        member.failures.clear()
        member.prefix = prefix
        self.start()

    def attach_again(self, prefix):
        """Cut the world's communicators and build them again, as after a loss."""
        member = self.member
        member.registry.abort()
        for group in [group for group in c10d._world.pg_map if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)
        member.registry.attach(member.store, prefix, TIMEOUT)
        member.failures.clear()


def run_fresh(member, backend, folder):
    """Run each test in a world of its own."""
    suite = Suite(member, backend, folder)
    suite.start()
    return suite.run("fresh", suite.start_anew)


def run_again(member, folder):
    """Run each test on groups that were attached again: before the first one after a kill."""
    replacement = member.rank == LOST and member.store.check(["killed"])
    suite = Suite(member, "deadpool", folder)
    suite.start(attached=not replacement)
    if not replacement:
        member.meet("up")
        if member.rank == LOST:
            member.store.wait(["never"], timedelta(seconds=LIMIT_S))
        dist.all_reduce(torch.ones(4))
        assert member.registry.state is GroupState.ABORTED
    member.meet("aborted")
    suite.attach_again("again")
    return suite.run("again", suite.attach_again)


def fresh(world: World, backend, folder):
    """Return what each rank's tests came to, in the order of ranks."""
    return [handle.result(LIMIT_S) for handle in world.start_all(run_fresh, backend, folder)]


def attached_again(world: World, folder):
    """Return the same of a world that has lost a rank and got it back."""
    handles = world.start_all(run_again, folder)
    world.store.wait(["met/up"], TIMEOUT)
    world.store.set("killed", "1")
    handles[LOST].kill()
    handles[LOST] = world.start(LOST, run_again, folder)
    return [handle.result(LIMIT_S) for handle in handles]
