"""In a Slurm allocation but outside a step: start an agent on every node with `srun`, and be its front.

A signal reaches the agents by the way that does not kill them, and the exit code is the job's, where srun's would be that
of its worst task (measured with Slurm 22.05).
"""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence

from deadpool_run.agent.console import tell
from deadpool_run.agent.records.outcome import outcome
from deadpool_run.agent.slurm.command import run_command
from deadpool_run.agent.slurm.discovery import Discovery
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.cli.cluster.slurm_place import srun_command
from deadpool_run.errors import UsageError

TOKEN = "DEADPOOL_TOKEN"  # noqa: S105 - the variable's name
_TOKEN_BYTES = 32
_FORWARDED_BY_SRUN = (signal.SIGUSR1, signal.SIGUSR2)
_SENT_BY_SCANCEL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""By srun's hand these would not reach the agents: it kills the step outright, or prints its state (SIGINT)."""
_PER_TASK = frozenset(
    {
        "SLURM_CPUS_PER_TASK",
        "SLURM_DISTRIBUTION",
        "SLURM_GPUS",
        "SLURM_GPUS_PER_SOCKET",
        "SLURM_GPUS_PER_TASK",
        "SLURM_HINT",
        "SLURM_NTASKS_PER_CORE",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS_PER_SOCKET",
        "SLURM_TRES_PER_TASK",
        "SRUN_CPUS_PER_TASK",
    }
)
"""How the batch job divided its nodes among tasks: an agent, the only task of its node, is to have all of the node."""


def start(place: Discovery, nodes: int, words: Sequence[str], environment: Mapping[str, str], spec: LaunchSpec) -> int:
    """Run an agent on each node to the end of the job, and return the job's exit code. Raises `UsageError`.

    `words` are this program's own arguments, which every agent is given again.
    """
    step_name = f"deadpool-{secrets.token_hex(4)}"
    command = [*srun_command(nodes, place.gpus, step_name), *own_command(sys.orig_argv, words)]
    front = _Front(place.job_id, step_name)
    code = asyncio.run(front.run(command, agent_environment(environment, spec)))
    found = outcome(spec.run_dir)
    if found is None:
        tell(f"the run's own record of its end is not to be read here ({spec.run_dir}): exit code {code} is srun's")
    return code if found is None else found


def own_command(original: Sequence[str], words: Sequence[str], instead: Sequence[str] | None = None) -> list[str]:
    """Return how to start this program again, with the same words or with others.

    `original` is the interpreter's whole command line, ending in `words`.
    """
    return [sys.executable, *original[1 : len(original) - len(words)], *(words if instead is None else instead)]


def agent_environment(environment: Mapping[str, str], spec: LaunchSpec) -> dict[str, str]:
    """Return what srun and the agents are started with; a token for this job alone is among it."""
    return {name: value for name, value in environment.items() if name not in _PER_TASK} | {
        TOKEN: environment.get(TOKEN) or secrets.token_hex(_TOKEN_BYTES),
        "DEADPOOL_RUN_ID": spec.run_id,
        "DEADPOOL_RUN_DIR": str(spec.run_dir),
    }


class _Front:
    """What the user started, while the agents run."""

    def __init__(self, job_id: str, step_name: str) -> None:
        self._job_id = job_id
        self._step_name = step_name
        self._sending: set[asyncio.Task[None]] = set()

    async def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run srun to its end, passing signals on."""
        loop = asyncio.get_running_loop()
        srun = await self._start(command, environment)
        for number in _FORWARDED_BY_SRUN:
            loop.add_signal_handler(number, _forward, srun, number)
        for number in _SENT_BY_SCANCEL:
            loop.add_signal_handler(number, self._begin_to_send, number)
        code = await srun.wait()
        for sending in tuple(self._sending):
            await sending
        return code if code >= 0 else os.EX_SOFTWARE

    async def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        try:
            # A group of its own: a terminal's Ctrl-C is for us alone, srun would make something else of it.
            return await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=asyncio.subprocess.DEVNULL, process_group=0
            )
        except OSError as error:
            raise UsageError(
                f"in an allocation of Slurm job {self._job_id}, but srun cannot be run here: {error.strerror}\n"
                "make it visible (in a container, mount Slurm's commands), or start the container itself with srun; "
                "--standalone uses this machine alone"
            ) from error

    def _begin_to_send(self, number: signal.Signals) -> None:
        task = asyncio.get_running_loop().create_task(self._send(number))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, number: signal.Signals) -> None:
        """Send a signal to every process of our step, through Slurm."""
        listed = await self._query("squeue", "--noheader", "--steps", f"--jobs={self._job_id}", "--format=%i %j")
        ours = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [self._step_name]]
        for step in ours:
            await self._query("scancel", f"--signal={number.name.removeprefix('SIG')}", step)
        if not ours:
            tell(f"{number.name} is not passed on: Slurm knows no step {self._step_name} of job {self._job_id}")

    async def _query(self, *command: str) -> str:
        """Return what a command of Slurm's prints, and print why it failed."""
        why, printed = await run_command(*command)
        if why:
            tell(f"{command[0]}: {why}")
        return printed


def _forward(srun: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if srun.returncode is None:
        srun.send_signal(number)
