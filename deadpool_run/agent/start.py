"""Starts the fork server, which takes longest to be ready, before it imports the rest of the agent."""

import contextlib
import os
import uuid

from deadpool_run.agent.console import tell
from deadpool_run.agent.environment import base_environment
from deadpool_run.agent.processes.forkserver_main import MARK
from deadpool_run.agent.processes.forkserver_process import ForkServerSpec
from deadpool_run.agent.records import old_runs, script_copy
from deadpool_run.agent.records.run_record import make_run_dir
from deadpool_run.agent.spec import LaunchSpec


def run(spec: LaunchSpec) -> int:
    """Run the job to its end and return the exit code. Raises `UsageError` if its directories cannot be used."""
    if spec.cluster is None:  # else the leader names it
        with contextlib.suppress(OSError):  # the run is refused, then
            if (aside := old_runs.set_aside(spec.run_dir)) is not None:
                tell(f"an earlier run of this name has ended; its records and logs are in {aside} now")
        make_run_dir(spec.run_dir)
        script_copy.write(spec)
    environment = base_environment(spec.nproc_per_node, os.environ) | {MARK: uuid.uuid4().hex}
    forkserver_spec = ForkServerSpec(spec.preload if spec.warm else (), environment)
    forkserver = forkserver_spec.start()

    from deadpool_run.agent.agent import run as run_agent  # noqa: PLC0415 - 0.4 s, in which the fork server imports torch

    return run_agent(spec, forkserver_spec, forkserver)
