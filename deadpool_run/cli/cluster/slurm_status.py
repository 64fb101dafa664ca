"""`status` of a run on other nodes, such as from a login node."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deadpool_run.agent.records.run_record import RECORD_NAME
from deadpool_run.agent.slurm.hostlist import expand
from deadpool_run.cli.cluster.slurm_start import own_command
from deadpool_run.cli.options.machine import state_dir
from deadpool_run.errors import NoSuchRunError, UsageError
from deadpool_run.wire.typed import read_object

_ANSWERS = (0, 3)
"""Exit codes of `status` if there is a run."""
_SQUEUE_TIMEOUT_S = 30.0
_NODES_ASKED = 8


def job_of(run_dir: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the Slurm job of this directory's run, else of the newest run, if it is on other machines.

    The runs' records name their jobs. None inside that job, because this process may be its `status` step.
    """
    found = (
        str(record["slurm_job"])
        for _, record in _live_records(run_dir, environment)
        if record.get("host") != socket.gethostname() and str(record["slurm_job"]) != environment.get("SLURM_JOB_ID")
    )
    return next(found, None)


def run_dir_of(job_id: str, environment: Mapping[str, str]) -> Path | None:
    """Return the directory of the newest run of this job; None if its records are not readable here."""
    found = (path for path, record in _live_records(None, environment) if str(record["slurm_job"]) == job_id)
    return next(found, None)


def _live_records(run_dir: Path | None, environment: Mapping[str, str]) -> list[tuple[Path, dict[str, Any]]]:
    """Return directory and record of the runs of Slurm jobs that have not ended, newest first."""
    patterns = (f"*/{RECORD_NAME}",) if run_dir is None else (RECORD_NAME, f"node-*/{RECORD_NAME}")
    top = run_dir or state_dir(environment)
    records = [(path.parent, read_object(path)) for pattern in patterns for path in top.glob(pattern)]
    live = [each for each in records if each[1].get("slurm_job") and each[1].get("ended", "unknown") is None]
    return sorted(live, key=lambda each: str(each[1].get("started")), reverse=True)


def status_through_slurm(job_id: str, words: Sequence[str]) -> int:
    """Run `status` with these words on a node of the job, and return its exit code. Raises `NoSuchRunError`.

    Tries several of the job's nodes in turn, because Slurm notices a lost node late.
    """
    if not job_id.isascii() or not job_id.replace("_", "").isdigit():
        raise UsageError(
            f"--slurm-job {job_id!r}: not a job number\nwrite it as squeue shows it, such as 1234 or 1234_5"
        )
    nodes = _nodes_of(job_id)
    for node in nodes[:_NODES_ASKED]:
        code = subprocess.run(_command(job_id, node, words), check=False).returncode  # noqa: S603 - fixed words
        if code in _ANSWERS:
            return code
    raise NoSuchRunError(
        f"no live run on the nodes of Slurm job {job_id} (asked {', '.join(nodes[:_NODES_ASKED])})\n"
        "if it was started with --run-dir, add the same option here"
    )


def _command(job_id: str, node: str, words: Sequence[str]) -> list[str]:
    """Return the srun command: overlaps the run's own step, and sets a size that overrides the job's variables."""
    terminal = ("--pty",) if sys.stdout.isatty() else ("--input=none",)
    step = ("--overlap", f"--jobid={job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--quiet", "--mpi=none")
    return ["srun", *step, *terminal, "--export=ALL", *own_command(sys.orig_argv, sys.argv[1:], ["status", *words])]


def _nodes_of(job_id: str) -> tuple[str, ...]:
    """Return the nodes that the job has now; its variables name those at its start."""
    command = ("squeue", "--noheader", f"--jobs={job_id}", "--states=RUNNING", "--format=%N")
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SQUEUE_TIMEOUT_S,
            env={name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSuchRunError(f"squeue: {error}\nrun this on a machine with Slurm's commands") from error
    lines = [line for line in done.stdout.split() if line != "(null)"]
    if done.returncode or not lines:
        raise NoSuchRunError(f"Slurm job {job_id} is not running {done.stderr.strip()}\n`squeue --me` lists your jobs")
    return tuple(node for line in lines for node in expand(line))
