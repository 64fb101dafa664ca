"""Specification of one launch: defaults applied, options checked. The command line builds it."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from pathlib import Path
from string import Template

from deadpool_run.agent.authority.bounded import BoundedAuthority
from deadpool_run.agent.chaos.plan import ChaosPlan
from deadpool_run.agent.slurm.discovery import Discovery
from deadpool_run.core.settings import Settings
from deadpool_run.errors import UsageError
from deadpool_run.ids import NodeId
from deadpool_run.wire.auth import Credentials
from deadpool_run.wire.checkpoints import DurableSpec

LOGS_OFF = Path(os.devnull)
"""A `log_dir` without log files and error files, as with torchrun."""

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

DEFAULT_HANG_TIMEOUT_S = 600.0
"""That of NCCL's watchdog. A long evaluation on rank 0 alone looks like a hang."""

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
    "deadpool_run.store.main",
    "deadpool_run.worker.job",
    "deadpool_run.worker.process.preloaded",
)
"""Modules that a worker imports until the first step of DDP, FSDP2 or tensor parallelism is over.

None of these modules touches a device, or starts a thread, which the fork server checks.
"""


class Mode(StrEnum):
    """How the target is run."""

    PATH = "path"
    """`argv[0]` is a Python file."""
    MODULE = "module"
    """`argv[0]` is a module's name, as after `python -m`."""
    EXEC = "exec"
    """`argv[0]` is any program."""


@dataclass(frozen=True, slots=True)
class Target:
    """The command of every rank, never empty. `${local_rank}` in an argument stands for the local rank, as under torchrun."""

    mode: Mode
    argv: tuple[str, ...]

    def to_json(self, copy: str = "") -> str:
        """Return the value of DEADPOOL_TARGET. Arguments are string templates, as under torchrun: `$$` is `$`.

        `copy` is the path of the script's copy; empty if there is none.
        """
        first = 1 if self.mode is Mode.EXEC else 0  # a program's name is not an argument
        words = [Template(word).safe_substitute(local_rank="${local_rank}") for word in self.argv[first:]]
        return json.dumps({"mode": self.mode.value, "argv": [*self.argv[:first], *words], "copy": copy})


class Streams(IntFlag):
    """A worker's output streams, with the numbers of torchrun's `--redirects` and `--tee`."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


class StartMethod(StrEnum):
    """How a worker's interpreter starts."""

    FORKSERVER = "forkserver"
    """Forked from a process that has imported torch."""
    SPAWN = "spawn"
    """A fresh interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How this node's agent finds the other nodes, and its place among them."""

    endpoints: tuple[tuple[str, int], ...]
    """Hosts and ports on which the leader may listen. The agent on the first one founds the job. Empty: `authority` knows."""
    token: bytes = field(repr=False)
    """Proves that an agent belongs to the job."""
    node_name: str
    node_rank: int | None = None
    """This node's place among the nodes that hold ranks; None if arrival decides."""
    failure_domain: str = ""
    """Label of what this node fails together with, such as a switch."""
    bandwidth: int | None = None
    """Limit for copies of snapshots, in bytes per second; None: no limit."""
    streams: int | None = None
    """Connections that a large snapshot of one rank is sent over. None: four for all ranks of a machine."""
    own_directory: bool = False
    """The user named a run directory. Else it gets the name of the leader's."""
    founds: bool = True
    """False: another node founds the job, even if its address is ours too."""
    authority: BoundedAuthority | None = None
    """Records which agent leads the run, and decides for two machines. None: the agents decide among themselves."""
    meeting: Path | None = None
    """Folder on a shared disk for the run's token and the authority's records; made if it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One launch on one node. Fields without a default are always resolved by the command line."""

    settings: Settings
    target: Target
    script: bytes | None = field(default=None, repr=False)
    """The content of the target's Python file, or None without one. Workers run this copy, so that edits during the job have no effect."""
    nproc_per_node: int
    run_id: str
    named: bool = False
    """The user named the run. Else a node that joins takes over the name."""
    run_dir: Path
    """Made by the agent, mode 0700. Its last component is the run's name, or this node's in the run's directory."""
    base_dir: Path | None = None
    """The run's directory where `run_dir` is this node's only."""
    keep_runs: int | None = None
    """Ended runs to keep in the directory above `run_dir`; older ones are removed. None: all, and always if the user named `run_dir`."""
    log_dir: Path | None = None
    """Base of torchrun's log tree. None: `run_dir / "logs"`. `LOGS_OFF`: no log files and no error files."""
    redirects: Mapping[int, Streams] = field(default_factory=dict)
    """Streams that go to files instead of the console, per local rank; none for a missing rank."""
    tee: Mapping[int, Streams] = field(default_factory=dict)
    """Streams that go to files and to the console with a prefix, per local rank."""
    log_line_prefix_template: str = ""
    """Template of that prefix. Empty: `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`, or torchrun's default."""
    local_ranks_filter: frozenset[int] | None = None
    """The local ranks whose output is on the console. None: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    """Tee'd lines with one of these also go to `filtered_stdout.log`."""
    duplicate_stderr_filters: tuple[str, ...] = ()
    snapshot_memory: int = 0
    """The most bytes that this node spends on snapshots and copies. 0: as many as there are."""
    verbose: bool = False
    """Print every decision, and all phases of a repair."""
    json_log: bool = False
    """Print the launcher's own lines as JSON objects."""
    metrics: tuple[str, int] | None = None
    """Host and port on which the leader serves metrics."""
    on_repair: tuple[str, ...] = ()
    """Command and arguments to run after each repair."""
    chaos: ChaosPlan | None = None
    """Faults to inject. None: no chaos run."""
    role: str = "default"
    start_method: StartMethod = StartMethod.FORKSERVER
    preload: tuple[str, ...] = DEFAULT_PRELOAD
    """Modules that the fork server imports before it forks."""
    python: str = sys.executable
    """Interpreter of spawned workers. The fork server always uses that of this process."""
    virtual_local_rank: bool = False
    """LOCAL_RANK is 0 everywhere and CUDA_VISIBLE_DEVICES names one device."""
    devices: int = 0
    """GPUs of this node, if there is one for each rank; else 0. Those that no rank uses are for spares and for ranks that move."""
    cpus: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """The CPUs that a local rank's worker may use. A missing rank may use all that the agent may."""
    signals_to_handle: tuple[int, ...] = DEFAULT_SIGNALS
    """Signals that stop the job."""
    hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S
    """If no rank makes progress for longer, the culprits are ended. 0: no detection."""
    cluster: Cluster | None = None
    """None: one machine."""
    durable: DurableSpec | None = None
    slurm: Discovery | None = None
    """The place in a Slurm job; None outside any."""

    def __post_init__(self) -> None:
        """Refuse a launch that a node cannot run."""
        if self.nproc_per_node != self.settings.ranks_per_node:
            raise UsageError(
                f"the job has {self.settings.ranks_per_node} ranks per node, this node {self.nproc_per_node}\n"
                "give all nodes the same --nproc-per-node"
            )
        if self.start_method is StartMethod.FORKSERVER and self.python != sys.executable:
            raise UsageError(f"the fork server cannot fork workers of {self.python}\nadd --start-method spawn")

    @property
    def command(self) -> Target:
        """The command of a forked child: with `spawn` a new interpreter."""
        if self.target.mode is Mode.EXEC or self.start_method is StartMethod.FORKSERVER:
            return self.target
        module = ("-m",) if self.target.mode is Mode.MODULE else ()
        return Target(Mode.EXEC, (self.python, "-u", *module, *self.target.argv))

    def credentials(self, node: NodeId) -> Credentials:
        """Return what this node's agent proves to the others of its run. Only for several machines."""
        assert self.cluster is not None
        return Credentials(self.cluster.token, node, self.run_id)

    @property
    def warm(self) -> bool:
        """Whether workers are forked with torch imported."""
        return self.start_method is StartMethod.FORKSERVER and self.target.mode is not Mode.EXEC
