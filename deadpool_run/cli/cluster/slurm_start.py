"""Starting an agent on every node of a Slurm allocation with `srun`.

This process passes signals on in the way that does not kill the agents, and exits with the job's exit code; srun itself
would exit with that of its worst task (measured with Slurm 22.05). The agents read the job's token from their standard input:
a site's prolog may log the environment of a step.
"""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence

from deadpool_run.agent.console import tell
from deadpool_run.agent.environment import without_ignored_hangup
from deadpool_run.agent.records.run_record import outcome
from deadpool_run.agent.slurm.command import run_command
from deadpool_run.agent.slurm.discovery import Discovery
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.cli.cluster.slurm_place import srun_command
from deadpool_run.cli.options.machine import find_token
from deadpool_run.errors import UsageError

TOKEN = "DEADPOOL_TOKEN"  # noqa: S105 - the variable's name
TOKEN_FILE = "DEADPOOL_TOKEN_FILE"  # noqa: S105 - as above
_TOKEN_BYTES = 32
_FORWARDED_BY_SRUN = (signal.SIGUSR1, signal.SIGUSR2)
_SENT_BY_SCANCEL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""srun would not pass these on: it kills the step, or prints its state (SIGINT)."""
_PER_TASK = frozenset(
    {
        *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_HINT"),
        *("SLURM_GPUS", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK"),
        *(f"SLURM_NTASKS_PER_{part}" for part in ("CORE", "GPU", "NODE", "SOCKET")),
    }
)
"""How the batch job divides its nodes among tasks. Removed, because an agent is the only task of its node."""


def start(place: Discovery, nodes: int, words: Sequence[str], environment: Mapping[str, str], spec: LaunchSpec) -> int:
    """Run an agent on each node until the job ends, and return its exit code. Raises `UsageError`.

    `words` are this program's own arguments; every agent gets them too, and `environment`. If that names no file with the
    token, the agents get one on their standard input.
    """
    step_name = f"deadpool-{secrets.token_hex(4)}"
    command = [*srun_command(nodes, place.gpus, step_name), *own_command(sys.orig_argv, words)]
    front = _Front(place.job_id, step_name)
    code = asyncio.run(front.run(command, agent_environment(environment, spec), _token(environment)))
    found = outcome(spec.run_dir)
    if found is None:
        tell(f"cannot read the run's record in {spec.run_dir}: using srun's exit code {code}")
    return code if found is None else found


def own_command(original: Sequence[str], words: Sequence[str], instead: Sequence[str] | None = None) -> list[str]:
    """Return the command that starts this program again, with the same words or with `instead`.

    `original` is the interpreter's whole command line, which ends in `words`.
    """
    return [sys.executable, *original[1 : len(original) - len(words)], *(words if instead is None else instead)]


def agent_environment(environment: Mapping[str, str], spec: LaunchSpec) -> dict[str, str]:
    """Return the environment of srun and the agents. It names the file with the token, and has no token."""
    found = {name: value for name, value in environment.items() if name not in _PER_TASK | {TOKEN}}
    token_file = environment.get(TOKEN_FILE) or "/dev/stdin"
    return found | {TOKEN_FILE: token_file, "DEADPOOL_RUN_ID": spec.run_id, "DEADPOOL_RUN_DIR": str(spec.run_dir)}


def _token(environment: Mapping[str, str]) -> bytes:
    """Return the user's token, else one for this job alone; nothing if the agents read it from a file. Raises `UsageError`."""
    if environment.get(TOKEN_FILE):
        return b""
    return find_token("", environment) if environment.get(TOKEN) else secrets.token_hex(_TOKEN_BYTES).encode()


class _Front:
    """The user's process, while srun and the agents run."""

    def __init__(self, job_id: str, step_name: str) -> None:
        self._job_id = job_id
        self._step_name = step_name
        self._sending: set[asyncio.Task[None]] = set()

    async def run(self, command: Sequence[str], environment: Mapping[str, str], given: bytes) -> int:
        """Run srun until it ends, and pass signals on. `given` is the standard input of every agent."""
        loop = asyncio.get_running_loop()
        srun = await self._start(command, environment)
        assert srun.stdin is not None
        srun.stdin.write(given)
        srun.stdin.close()
        for number in _FORWARDED_BY_SRUN:
            loop.add_signal_handler(number, _forward, srun, number)
        for number in without_ignored_hangup(_SENT_BY_SCANCEL):
            loop.add_signal_handler(number, self._begin_to_send, number)
        code = await srun.wait()
        await asyncio.gather(*self._sending)
        return code if code >= 0 else os.EX_SOFTWARE

    async def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        try:
            # A process group of its own, because srun handles a terminal's Ctrl-C differently.
            return await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=asyncio.subprocess.PIPE, process_group=0
            )
        except OSError as error:
            raise UsageError(
                f"cannot run srun in the allocation of Slurm job {self._job_id}: {error.strerror}\n"
                "in a container, mount Slurm's commands or start the container with srun; "
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
            tell(f"{number.name} not passed on: Slurm has no step {self._step_name} in job {self._job_id}")

    async def _query(self, *command: str) -> str:
        """Return what a command of Slurm's prints, and print why it failed."""
        why, printed = await run_command(*command)
        if why:
            tell(f"{command[0]}: {why}")
        return printed


def _forward(srun: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if srun.returncode is None:
        srun.send_signal(number)
