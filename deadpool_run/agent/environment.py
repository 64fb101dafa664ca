"""Environment variables of a worker: torchrun's and our own. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals

from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.ids import ONLY_NODE, Epoch, Rank, WorkerId
from deadpool_run.wire import check

_OUTER_LAUNCHERS = ("PET_", "TORCHELASTIC_", "DEADPOOL_")
"""Options and worker variables of an outer launcher. Inherited, they would misconfigure an inner one."""

_OMP_BANNER = (
    "OMP_NUM_THREADS is not set: each of the {workers} workers gets {threads}, so that together they do not overload "
    "this machine; set it to tune them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """A worker's rank, and what it needs to take it."""

    worker: WorkerId
    rank: Rank
    local_rank: int
    epoch: Epoch
    generation: int
    replacement: bool
    capture_interval: int
    store_host: str
    store_port: int
    error_file: str
    """Where the script's exception is written; empty: nowhere."""
    node: str = ONLY_NODE
    address: str = "127.0.0.1"
    """Where workers on other nodes reach this node's: an IP literal."""
    replicates: bool = False
    resume: int = -1
    """The version that its first slot was loaded with; -1: none."""


def base_environment(spec: LaunchSpec, outer: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all processes of the job share."""
    env = {
        name: value
        for name, value in outer.items()
        if not name.startswith(_OUTER_LAUNCHERS) or name == check.VARIABLE  # that one is meant for our workers
    }
    threads = omp_num_threads(spec, outer)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    return env


def omp_num_threads(spec: LaunchSpec, outer: Mapping[str, str]) -> int | None:
    """Return the value for OMP_NUM_THREADS; None to leave it as it is."""
    if "OMP_NUM_THREADS" in outer:
        return None
    if spec.omp_num_threads is not None:
        return spec.omp_num_threads
    return 1 if spec.nproc_per_node > 1 else None


def omp_banner(spec: LaunchSpec, outer: Mapping[str, str]) -> str | None:
    """Return torchrun's warning, if the user chose no number."""
    threads = omp_num_threads(spec, outer)
    if threads is None or spec.omp_num_threads is not None:
        return None
    return _OMP_BANNER.format(threads=threads, workers=spec.nproc_per_node)


def worker_environment(spec: LaunchSpec, seat: WorkerPlace, outer: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the worker in this seat.

    GROUP_RANK is the number of the rank's first node, and stays the same when the rank moves.
    """
    env = base_environment(spec, outer)
    world_size = str(spec.settings.world_size)
    env |= {
        "RANK": str(seat.rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": "0" if spec.virtual_local_rank else str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_RANK": str(seat.rank // spec.nproc_per_node),
        "GROUP_WORLD_SIZE": str(spec.settings.nodes),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": seat.store_host,
        "MASTER_PORT": str(seat.store_port),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(seat.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.settings.max_restarts or 0),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": seat.error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(Signals(number).name for number in spec.signals_to_handle),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": outer.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "DEADPOOL_RUN_ID": spec.run_id,
        "DEADPOOL_RUN_DIR": str(spec.run_dir),
        "DEADPOOL_EPOCH": str(seat.epoch),
        "DEADPOOL_WORKER": str(seat.worker),
        "DEADPOOL_REPLACEMENT": str(int(seat.replacement)),
        "DEADPOOL_STORE": f"{seat.store_host}:{seat.store_port}",
        "DEADPOOL_CAPTURE_INTERVAL": str(seat.capture_interval),
        "DEADPOOL_RESUME_VERSION": str(seat.resume),
        "DEADPOOL_TARGET": spec.command.to_json(),
    }
    if spec.cluster is not None:
        env |= {
            "DEADPOOL_NODE": seat.node,
            "DEADPOOL_NODE_ADDR": seat.address,
            "DEADPOOL_REPLICATE": str(int(seat.replicates)),
        }
    if spec.virtual_local_rank:
        env["CUDA_VISIBLE_DEVICES"] = _own_device(outer.get("CUDA_VISIBLE_DEVICES"), seat.local_rank)
    return env


def _own_device(visible: str | None, local_rank: int) -> str:
    """Return the device of this local rank among those that the launcher may see."""
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    return devices[local_rank] if local_rank < len(devices) else visible
