"""What one launch is to do, resolved: every default applied, every option checked. The command line builds it."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from pathlib import Path
from string import Template

from deadpool_run.agent.slurm.discovery import Discovery
from deadpool_run.core.settings import Settings
from deadpool_run.errors import UsageError

LOGS_OFF = Path(os.devnull)
"""As `log_dir`: neither log files nor error files (torchrun's meaning of /dev/null)."""

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

DEFAULT_HANG_TIMEOUT_S = 600.0
DEFAULT_DURABLE_TIMEOUT_S = 1800.0
"""As long as NCCL's own watchdog waits: rank 0 alone, at a long evaluation, looks just like a hang."""

DEFAULT_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "deadpool_run.worker.process.bootstrap",
    "deadpool_run.worker.job",
)
"""Imports of our own side and of the first step of DDP, FSDP2 or tensor parallelism: a worker has none left to do.

None of them starts a thread or touches a device (the fork server checks the first).
"""


class Mode(StrEnum):
    """How the target is run."""

    PATH = "path"
    """`argv[0]` is a Python file."""
    MODULE = "module"
    """`argv[0]` is a module's name, as after `python -m`."""
    EXEC = "exec"
    """`argv[0]` is a program; nothing of Python is assumed."""


@dataclass(frozen=True, slots=True)
class Target:
    """What every rank runs. `${local_rank}` in an argument becomes the rank's local rank, as under torchrun."""

    mode: Mode
    argv: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse an empty command."""
        if not self.argv:
            raise UsageError("nothing to run: name a script, a module (-m) or a program (--no-python)")

    def to_json(self) -> str:
        """Return the value of DEADPOOL_TARGET: in an argument, `${local_rank}` stands for the worker's own.

        torchrun has string templates there: `$local_rank` is the same, and `$$` is `$`.
        """
        first = 1 if self.mode is Mode.EXEC else 0  # a program's name is not an argument
        words = [Template(word).safe_substitute(local_rank="${local_rank}") for word in self.argv[first:]]
        return json.dumps({"mode": self.mode.value, "argv": [*self.argv[:first], *words]})


class Streams(IntFlag):
    """A choice of a worker's output streams, numbered as torchrun's `--redirects` and `--tee` number them."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


class StartMethod(StrEnum):
    """How a worker's interpreter comes to be."""

    FORKSERVER = "forkserver"
    """Forked from a process that has imported torch."""
    SPAWN = "spawn"
    """A fresh interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How this node's agent finds those of the other nodes, and what it is among them."""

    endpoints: tuple[tuple[str, int], ...]
    """Where the coordinator's agent listens, as host and port; the agent on the first one founds the job. None: see `meeting`."""
    token: bytes = field(repr=False)
    """Who has it is one of us."""
    node_name: str
    node_rank: int | None = None
    """This node's place among those that hold ranks; None if arrival decides."""
    failure_domain: str = ""
    """What it shares with its neighbours, such as a switch."""
    node_timeout_s: float = 5.0
    """A node that is silent for so long is lost."""
    bandwidth: int | None = None
    """Bytes per second that copies of snapshots may take; None: all there is."""
    streams: int | None = None
    """Connections that a large snapshot of one rank is sent over. None: four for all ranks of a machine."""
    own_directory: bool = False
    """The user named a run directory; else it is called as the coordinator's is."""
    founds: bool = True
    """False: another node is known to be the first, even if its address were ours too."""
    meeting: Path | None = None
    """Folder on a shared disk where the agents find each other (`agent.meeting`), as nobody's address is known before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableSpec:
    """Checkpoints that outlive the job."""

    target: str
    """A directory or a URL; empty: none is written, and `resume` names the one to begin from."""
    every_steps: int | None = None
    every_s: float | None = None
    """One of both is set where there is a target."""
    keep: int = 2
    """As many of the newest are kept."""
    resume: str = "auto"
    """auto, never, or a checkpoint's path or URL."""
    timeout_s: float = DEFAULT_DURABLE_TIMEOUT_S
    """What one machine is to do for a checkpoint, or for a step of one that several write, is given up after so long."""
    exit_on_usr1: bool = True
    """Whether the job ends, to be queued again, once SIGUSR1 has had a checkpoint written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One launch on one node. Fields without a default are always resolved by the command line."""

    settings: Settings
    target: Target
    nproc_per_node: int
    run_id: str
    run_dir: Path
    """Made by the agent, mode 0700. Its last component is the run's name, or this node's in the run's directory."""
    base_dir: Path | None = None
    """The run's directory where `run_dir` is this node's only."""
    log_dir: Path | None = None
    """Base of torchrun's log tree. None: `run_dir / "logs"`. `LOGS_OFF`: no logs, no error files."""
    redirects: Mapping[int, Streams] = field(default_factory=dict)
    """Streams that go to files instead of the console, per local rank; a rank that is not named has none."""
    tee: Mapping[int, Streams] = field(default_factory=dict)
    """Streams that go to files and to the console with a prefix, per local rank."""
    local_ranks_filter: frozenset[int] | None = None
    """Only these local ranks are seen on the console. None: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    """Tee'd lines that hold one of these also go to `filtered_stdout.log`."""
    duplicate_stderr_filters: tuple[str, ...] = ()
    role: str = "default"
    start_method: StartMethod = StartMethod.FORKSERVER
    preload: tuple[str, ...] = DEFAULT_PRELOAD
    """Modules that the fork server imports before it forks."""
    python: str = sys.executable
    """Interpreter of spawned workers. The fork server's is always this process's own."""
    omp_num_threads: int | None = None
    """OMP_NUM_THREADS of workers where the environment has none. None: torchrun's rule (1 if nproc_per_node > 1)."""
    virtual_local_rank: bool = False
    """LOCAL_RANK is 0 everywhere and CUDA_VISIBLE_DEVICES names one device."""
    cpus: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """The CPUs that a local rank's worker may use. A rank that is not named may use all that we may."""
    signals_to_handle: tuple[int, ...] = DEFAULT_SIGNALS
    """Signals that end the job in order."""
    hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S
    """Without progress of any rank for so long, those to blame are ended. 0: hangs are not looked for."""
    cluster: Cluster | None = None
    """None: one machine, nobody to talk to."""
    durable: DurableSpec | None = None
    slurm: Discovery | None = None
    """Our place in a Slurm job; None outside any."""

    def __post_init__(self) -> None:
        """Refuse what a node cannot do."""
        if self.nproc_per_node != self.settings.ranks_per_node:
            raise UsageError(
                f"{self.settings.ranks_per_node} ranks for each node of {self.nproc_per_node}: give all nodes the same "
                "--nproc-per-node"
            )
        if self.start_method is StartMethod.FORKSERVER and self.python != sys.executable:
            raise UsageError(f"the fork server cannot fork workers of {self.python}: add --start-method spawn")

    @property
    def shutdown_timeout_s(self) -> float:
        """From SIGTERM to SIGKILL."""
        return self.settings.shutdown_timeout_s

    @property
    def command(self) -> Target:
        """What the forked child is told to run: in a fresh interpreter, a program."""
        if self.target.mode is Mode.EXEC or self.start_method is StartMethod.FORKSERVER:
            return self.target
        module = ("-m",) if self.target.mode is Mode.MODULE else ()
        return Target(Mode.EXEC, (self.python, "-u", *module, *self.target.argv))

    @property
    def warm(self) -> bool:
        """Whether workers are forked with torch imported."""
        return self.start_method is StartMethod.FORKSERVER and self.target.mode is not Mode.EXEC
