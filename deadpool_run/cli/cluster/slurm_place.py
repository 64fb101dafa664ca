"""Launching in a Slurm job: the options that Slurm sets, and the process that starts the agents.

Pure, except for `notes`, which reads the batch script, and the function that `token_reader` returns.
"""

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from deadpool_run.agent.rendezvous.shared_folder import SharedFolder
from deadpool_run.agent.slurm import batch_script
from deadpool_run.agent.slurm.discovery import Discovery, discover
from deadpool_run.cli.cluster.nodes import machine_count
from deadpool_run.cli.cluster.spec_builder import directory_name
from deadpool_run.cli.options.machine import state_dir
from deadpool_run.cli.options.resolve import INSIDE_WORKER, Values
from deadpool_run.errors import UsageError

_NAMES_SHOWN = 8


def find(values: Values, environment: Mapping[str, str]) -> Discovery | None:
    """Return our place in a Slurm job; None outside any, with --no-slurm, and inside a worker."""
    if values.flag("no_slurm") or INSIDE_WORKER in environment:
        return None
    return discover(environment)


def detected(values: Values, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the options that Slurm sets. Raises `UsageError` if the step has several tasks for one node."""
    place = find(values, environment)
    if place is None:
        return {}
    if values.flag("standalone"):
        return {"nproc_per_node": str(place.gpus)} if place.gpus else {}
    if place.step is not None and place.step.tasks_here > 1 and not values["node_rank"].is_set:
        raise UsageError(
            f"{place.step.tasks_here} tasks of this step are on node {place.name}, and each would start workers for all of it\n"
            "start one for each node: `srun --ntasks-per-node=1 deadpool-run ...`, or leave srun out of the batch script"
        )
    if is_array_run(values, place):
        found = place.array_options()
        return found | {"rdzv_endpoint": str(meeting_folder(values, environment, found["run_id"]))}
    found = place.options()
    if "rdzv_endpoint" in found and not _has_token(values.text("token_file"), environment):
        # A later job may have the same --run-id, and is another run.
        found["authority"] = f"file:{meeting_folder(values, environment, place.run_id) / place.run_id}"
    if nodes := nodes_to_start(values, place):
        found |= {"nnodes": str(nodes), "run_id": place.run_id}
        if nodes > 1:
            found["rdzv_endpoint"] = place.endpoint  # for the plan only: each agent finds a better one in its step
    return found


def meeting_folder(values: Values, environment: Mapping[str, str], run_id: str) -> Path:
    """Return the folder, below the run's directory, where agents meet that do not know each other's addresses."""
    run_dir = values.text("run_dir") or state_dir(environment) / directory_name(values.text("run_id") or run_id)
    return Path(run_dir).absolute() / "meeting"


def token_reader(
    values: Values, environment: Mapping[str, str], place: Discovery, otherwise: Callable[[str], bytes]
) -> Callable[[str], bytes]:
    """Return a function that reads the run's token. Agents that got none create it in the folder where they meet."""
    if place.step is None and not is_array_run(values, place):
        return otherwise

    def read(name: str) -> bytes:
        if _has_token(name, environment):
            return otherwise(name)
        return SharedFolder(meeting_folder(values, environment, place.run_id)).token().encode()

    return read


def _has_token(file: str, environment: Mapping[str, str]) -> bool:
    """Return whether the user gave a token. If not, the nodes share one in a folder, and so they share a disk."""
    return bool(file or environment.get("DEADPOOL_TOKEN"))


def nodes_to_start(values: Values, place: Discovery | None) -> int:
    """Return the number of nodes on which to start agents; 0 if this process is the agent. Raises `UsageError`."""
    if place is None or place.step is not None or values.flag("standalone"):
        return 0
    if values["rdzv_endpoint"].is_set or values["node_rank"].is_set:
        return 0  # the user starts the agents, for example with ssh
    wanted = _nodes_wanted(values, len(place.nodes))
    if (wanted == 1 and place.name in place.nodes) or is_array_run(values, place):
        return 0
    if wanted > len(place.nodes):
        raise values.refuse(
            "nnodes",
            f"job {place.job_id} has {len(place.nodes)}",
            "submit it with more --nodes, which counts the spare ones too, or remove --nnodes to use all nodes of the job",
        )
    return wanted


def is_array_run(values: Values, place: Discovery) -> bool:
    """Return whether the tasks of a job array are the nodes of one run: --nnodes asks for more nodes than a task has.

    Without --nnodes every task is a run of its own, as in a sweep.
    """
    if place.array is None or place.step is not None or len(place.nodes) > 1:
        return False
    return 1 < _nodes_wanted(values, 1) <= place.array.count


def _nodes_wanted(values: Values, job_nodes: int) -> int:
    """Return what `--nnodes` asks for, by default the whole job."""
    return machine_count(values) if values["nnodes"].is_set else job_nodes


def srun_command(nodes: int, gpus: int, step_name: str) -> list[str]:
    """Return the `srun` before the agent's command.

    `--no-kill`, `--kill-on-bad-exit=0` and `--wait=0` keep the step alive after the loss of a node or task. The one task
    of a node starts workers for all its CPUs (`--cpu-bind=none`) and GPUs (`--gpus-per-node`; else it gets as many as the
    job asked for per task). `--mpi=none` switches off the site's MPI. `--export=ALL` overrides a job's `--export=NONE`.
    `--input=all` gives srun's standard input, the token, to each task.
    """
    return [
        "srun",
        *("--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
        *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"),
        *((f"--gpus-per-node={gpus}",) if gpus else ()),
        *("--export=ALL", "--input=all", "--mpi=none", f"--job-name={step_name}"),
    ]


def notes(place: Discovery, nodes: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the command that starts the agents, and what the user should change about the job."""
    names = ", ".join(place.nodes[: min(nodes, _NAMES_SHOWN)]) + (", ..." if nodes > _NAMES_SHOWN else "")
    command = shlex.join(srun_command(nodes, place.gpus, "deadpool-run"))
    yield f"job {place.job_id}: one agent on each of {nodes} nodes ({names}), started with `{command}`"
    script = find_batch_script() if place.batch else None
    if script is not None and not batch_script.survives_node_loss(script) and not environment.get("SBATCH_NO_KILL"):
        yield (
            "the batch script has no `#SBATCH --no-kill`: unless sbatch was given --no-kill, Slurm ends this job as "
            "soon as one of its nodes fails, and no spare can prevent that"
        )
    if environment.get("SLURM_HET_SIZE", "1") not in {"", "0", "1"}:
        yield (
            "this job is heterogeneous, and only its first component is used; for all of it, start the agents yourself: "
            "`srun --het-group=0,1 --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 deadpool-run ...`"
        )


def find_batch_script() -> str | None:
    """Return the text of the batch script that we run in. The shell that runs it is one of our ancestors."""
    import psutil  # noqa: PLC0415 - only a batch script needs it

    with contextlib.suppress(OSError, psutil.Error):
        for ancestor in psutil.Process().parents():
            for word in ancestor.cmdline():
                if word.endswith("/slurm_script"):
                    return Path(word).read_text(encoding="utf-8", errors="replace")
    return None
