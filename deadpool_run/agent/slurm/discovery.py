"""This process's place in a Slurm job, from Slurm's variables: srun(1), sbatch(1), measured with Slurm 22.05. Pure.

A process is in a *step* (`srun` started it: an agent) or in an *allocation* only (a batch script, or the shell of salloc).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_run.agent.slurm import hostlist
from deadpool_run.errors import UsageError

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Step numbers from here on are Slurm's own: the batch script, the shell of salloc, what ssh adopts."""
_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below Linux's ephemeral ports, which start at 32768."""


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """This process's place in a step."""

    number: int
    index: int
    """Position of this node among the step's nodes."""
    tasks_here: int
    """Tasks of the step on this node."""
    nodes: tuple[str, ...]
    starter: str
    """HOST:PORT on which the `srun` that started the step listens; empty if unknown."""


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """This job's place in a job array."""

    job_id: str
    """The array's: all its tasks share it."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The job and this process's place in it."""

    job_id: str
    restarts: int
    """How often the job was requeued."""
    nodes: tuple[str, ...]
    """The job's at its start, in Slurm's order; the batch script runs on the first."""
    batch: bool
    """Whether it is a batch job."""
    name: str
    """This node's; empty outside the job's nodes (the shell of salloc on a login node)."""
    step: SlurmStep | None
    """None in an allocation only."""
    array: ArrayTask | None
    first_host: tuple[str, ...]
    """Addresses or names of the first node of the step, the best first."""
    gpus: int
    """GPUs of this node; 0 if the job asked for none, or if Slurm does not say."""
    failure_domain: str
    """The switches above this node, from the top, joined by dots; empty if they are unknown."""

    @property
    def run_id(self) -> str:
        """The run's name: the same in every task of a step, different in each step."""
        step = f".{self.step.number}" if self.step else ""
        return f"slurm-{self.job_id}{step}" + (f"-r{self.restarts}" if self.restarts else "")

    @property
    def port(self) -> int:
        """Port of the first leader: the same in every task of a step, seldom that of another job."""
        digest = hashlib.sha256(self.run_id.encode()).digest()
        return _FIRST_PORT + int.from_bytes(digest[:4]) % _PORTS

    @property
    def endpoint(self) -> str:
        """`--rdzv-endpoint`: every address of the first node."""
        return ",".join(f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in self.first_host)

    def options(self) -> dict[str, str]:
        """Return the options that Slurm gives an agent of a step, as text."""
        found = {"nproc_per_node": str(self.gpus)} if self.gpus else {}
        if self.step is None:
            return found
        found |= {"run_id": self.run_id, "nnodes": str(len(self.step.nodes))}
        if len(self.step.nodes) > 1:
            found |= {"node_rank": str(self.step.index), "rdzv_endpoint": self.endpoint, "node_name": self.name}
            found |= {"topology": self.failure_domain} if self.failure_domain else {}
        return found

    def array_options(self) -> dict[str, str]:
        """Return the options of an agent in a job array whose tasks are the nodes of one run.

        The tasks start one by one, so the nodes have no order and no known address.
        """
        assert self.array is not None
        found = {"run_id": f"slurm-{self.array.job_id}", "node_name": self.name}
        found |= {"topology": self.failure_domain} if self.failure_domain else {}
        return found | ({"nproc_per_node": str(self.gpus)} if self.gpus else {})


def discover(environment: Mapping[str, str]) -> Discovery | None:
    """Return our place in a Slurm job; None outside any. Raises `UsageError` for values that Slurm does not set."""
    job_id = environment.get("SLURM_JOB_ID", "")
    names = environment.get("SLURM_JOB_NODELIST", "")
    if not job_id or not names:
        return None
    step = _step(environment)
    nodes = hostlist.expand(names)
    return Discovery(
        job_id=job_id,
        restarts=_number(environment, "SLURM_RESTART_COUNT"),
        nodes=nodes,
        batch=environment.get("ENVIRONMENT") == "BATCH",
        name=environment.get("SLURMD_NODENAME", "") or (step.nodes[step.index] if step else ""),
        step=step,
        array=_array(environment),
        first_host=_first_host(environment, nodes, step),
        gpus=_number(environment, "SLURM_GPUS_ON_NODE"),
        failure_domain=_failure_domain(environment),
    )


def _step(environment: Mapping[str, str]) -> SlurmStep | None:
    if not environment.get("SLURM_STEP_ID") or not environment.get("SLURM_PROCID"):
        return None
    number = _number(environment, "SLURM_STEP_ID")
    if number >= _FIRST_SPECIAL_STEP:
        return None
    nodes = hostlist.expand(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])
    index = _number(environment, "SLURM_NODEID")
    if index >= len(nodes):
        raise UsageError(
            f"SLURM_NODEID is {index}, but the step has {len(nodes)} nodes: {','.join(nodes)}\n"
            "these variables are of different steps; --no-slurm ignores them"
        )
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE")
    counts = hostlist.expand_counts(tasks) if tasks else ()
    host, port = environment.get("SLURM_SRUN_COMM_HOST", ""), environment.get("SLURM_SRUN_COMM_PORT", "")
    return SlurmStep(
        number=number,
        index=index,
        tasks_here=counts[index] if index < len(counts) else 1,
        nodes=nodes,
        starter=f"{host}:{port}" if host and port else "",
    )


def _array(environment: Mapping[str, str]) -> ArrayTask | None:
    if not environment.get("SLURM_ARRAY_JOB_ID"):
        return None
    return ArrayTask(environment["SLURM_ARRAY_JOB_ID"], _number(environment, "SLURM_ARRAY_TASK_COUNT", 1))


def _first_host(environment: Mapping[str, str], nodes: tuple[str, ...], step: SlurmStep | None) -> tuple[str, ...]:
    """Return the addresses of the step's first node, the best first.

    `srun` gives the address of its own machine: in a batch script the job's first node, else perhaps a login node.
    """
    first = step.nodes[0] if step else nodes[0]
    launcher = environment.get("SLURM_LAUNCH_NODE_IPADDR") or environment.get("SLURM_SRUN_COMM_HOST", "")
    if step is None or not launcher:
        return (first,)
    in_batch = environment.get("ENVIRONMENT") == "BATCH" and nodes[0] == first
    return (launcher, first) if in_batch else (first, launcher)


def _failure_domain(environment: Mapping[str, str]) -> str:
    """Return the switches of `top.leaf1.n3` whose pattern is `switch.switch.node`."""
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    parts = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    if len(kinds) != len(parts):
        return ""  # a name has a dot in it: no label is better than a wrong one
    return ".".join(part for kind, part in zip(kinds, parts, strict=True) if kind == "switch")


def _number(environment: Mapping[str, str], variable: str, default: int = 0) -> int:
    text = environment.get(variable, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{variable} is {text!r}, not a number\nunset it, or add --no-slurm")
    return int(text)
