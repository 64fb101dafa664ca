"""The environment that gives a worker its rank, with torchrun's variables and our own. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals

from deadpool_run.agent.records import script_copy
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.core.effects import AssignRank
from deadpool_run.wire.peers import Peer, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A rank for a worker, with what the worker needs to take it."""

    order: AssignRank
    world: World
    here: Peer
    capture_interval: int
    error_file: str
    """The file for the script's exception; empty for none."""
    resume: int
    """The version in its first slot, loaded from a checkpoint; -1 for none."""


def worker_environment(spec: LaunchSpec, assignment: Assignment, shared: Mapping[str, str]) -> dict[str, str]:
    """Return the worker's environment: its own variables, and those that all processes of the job share.

    GROUP_RANK is the number of the rank's first node. It stays the same when the rank moves.
    """
    order, world, here = assignment.order, assignment.world, assignment.here
    world_size = str(spec.settings.world_size)
    env = {
        **shared,
        "RANK": str(order.rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": "0" if spec.virtual_local_rank else str(order.local_rank),
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_RANK": str(order.rank // spec.nproc_per_node),
        "GROUP_WORLD_SIZE": str(spec.settings.nodes),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(order.rank),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": world.store_host,
        "MASTER_PORT": str(world.store_port),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(world.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.settings.max_restarts or 0),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": assignment.error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(Signals(number).name for number in spec.signals_to_handle),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": shared.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "DEADPOOL_RUN_ID": spec.run_id,
        "DEADPOOL_RUN_DIR": str(spec.run_dir),
        "DEADPOOL_EPOCH": str(order.epoch),
        "DEADPOOL_WORKER": str(order.worker),
        "DEADPOOL_REPLACEMENT": str(int(order.replacement)),
        "DEADPOOL_STORE": f"{world.store_host}:{world.store_port}",
        "DEADPOOL_CAPTURE_INTERVAL": str(assignment.capture_interval),
        "DEADPOOL_RESUME_VERSION": str(assignment.resume),
        "DEADPOOL_TARGET": spec.command.to_json(script_copy.path(spec)),
    }
    if spec.cluster is not None:
        env |= {
            "DEADPOOL_NODE": here.node,
            "DEADPOOL_NODE_ADDR": here.address,
            "DEADPOOL_REPLICATE": "1",  # snapshots are copied to other nodes, so workers report each one
        }
    if spec.virtual_local_rank:
        env["CUDA_VISIBLE_DEVICES"] = _own_device(shared.get("CUDA_VISIBLE_DEVICES"), order.local_rank)
    return env


def _own_device(visible: str | None, local_rank: int) -> str:
    """Return the device of this local rank among those that the launcher may see."""
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    return devices[local_rank] if local_rank < len(devices) else visible
