"""A Slurm of pretend nodes for the tests that need a real one; they are skipped where there is none."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit import slurm_lab
from kit.account import Account, States
from kit.cluster import SCRIPTS, Cluster
from kit.slurm_lab import SlurmLab

STEPS = 30
RECIPES = Path(__file__).parents[2] / "recipes" / "slurm"


def pytest_collection_modifyitems(items):
    for item in items:
        if {"lab", "shared_lab"} & set(item.fixturenames):
            item.add_marker("slurm")


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory) -> Iterator[SlurmLab]:
    """Four nodes, for tests that leave them as they were."""
    yield from _lab(tmp_path_factory)


@pytest.fixture
def lab(tmp_path_factory, request) -> Iterator[SlurmLab]:
    """Four nodes of the test's own, or as many as it is parametrized with."""
    yield from _lab(tmp_path_factory, getattr(request, "param", 4))


def _lab(tmp_path_factory, nodes: int = 4) -> Iterator[SlurmLab]:
    if why := slurm_lab.missing():
        pytest.skip(why)
    made = SlurmLab(tmp_path_factory.mktemp("slurm"), nodes)
    try:
        yield made
        print(made.told())  # which pytest shows if the test failed
    finally:
        made.close()


class Training:
    """A batch job, that of a recipe, which trains the tests' script instead; and that script's own account of every step.

    `options` are further ones of sbatch. The script is told `words`, and holds before step `hold` until `release`.
    """

    def __init__(
        self, lab: SlurmLab, recipe: str, *words: str, options: Sequence[str] = (), ranks: int = 1, hold: int = -1
    ) -> None:
        self.lab = lab
        self.flags = lab.work / "flags"
        self.flags.mkdir()
        for fifo in (lab.work / "events", self.flags / "release"):
            os.mkfifo(fifo)
        self._fifo = os.open(lab.work / "events", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._gate = os.open(self.flags / "release", os.O_RDWR | os.O_CLOEXEC)
        self._partial = b""
        self.events: list[dict] = []
        told = ("--steps", str(STEPS), "--flags", str(self.flags), "--hold", str(hold), *words)
        script, found = re.subn(
            r"^deadpool-run (.*) train\.py ",
            rf"deadpool-run --no-config --nproc-per-node {ranks} --node-timeout 2 \1 {SCRIPTS / 'train.py'} ",
            (RECIPES / f"{recipe}.sbatch").read_text(),
            flags=re.MULTILINE,
        )
        assert found == 1
        path = lab.work / "recipe.sh"
        path.write_text(script)
        self.job = lab.sbatch(path, *options, env={"KIT_EVENTS": str(lab.work / "events")}, words=told)

    @property
    def account(self) -> Account:
        """The events that the script has reported so far."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fifo, 1 << 16):
                *lines, self._partial = (self._partial + data).split(b"\n")
                self.events += map(json.loads, lines)
        return Account(self.events)

    def wait_version(self, version: int, ranks: int = 3) -> None:
        """Wait until so many ranks are at this version."""

        def met() -> bool:
            return len({rank for rank, reached in self.account.states() if reached >= version}) == ranks

        self.lab.wait_until(met, f"{ranks} ranks at version {version}")

    def wait_held(self) -> None:
        """Wait until the script holds."""
        self.lab.wait_until(lambda: self.account.of("held"), "hold of the script")

    def release(self) -> None:
        """Let it go on."""
        os.write(self._gate, b".")

    def node_of(self, rank: int) -> str:
        """Return the node whose process holds the rank, by its own account."""
        environment = Path(f"/proc/{self.account.pids(rank)[-1]}/environ").read_bytes().split(b"\0")
        return next(word.partition(b"=")[2].decode() for word in environment if word.startswith(b"SLURMD_NODENAME="))

    def close(self) -> None:
        """Let go of the channels; the lab ends the job."""
        os.close(self._fifo)
        os.close(self._gate)


@pytest.fixture
def training(lab: SlurmLab) -> Iterator[Callable[..., Training]]:
    """Start a training on the lab: arguments as of `Training`, without the lab."""
    started: list[Training] = []

    def start(*args: str, **more: Any) -> Training:
        started.append(Training(lab, *args, **more))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., States]:
    """Return every state of an unfailed run on one machine, from a version on. Each number of ranks is run once."""
    known: dict[int, States] = {}

    def states(ranks: int = 3, first: int = 0) -> States:
        if ranks not in known:
            job = Cluster(tmp_path_factory.mktemp("reference"), "--steps", str(STEPS), nproc=ranks, spares=0)
            try:
                assert job.wait_exit() == 0, job.told()
            finally:
                job.close()
            known[ranks] = job.account.states()
        return {at: digest for at, digest in known[ranks].items() if at[1] >= first}

    return states
