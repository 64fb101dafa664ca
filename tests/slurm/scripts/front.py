"""A front of `slurm_start`, and, inside its step, a stand-in for an agent: tells what it was given, and does as told.

Arguments: the exit code of the last node's task, and that of the job (`-`: no record is written).
"""

import json
import os
import signal
import sys
from pathlib import Path

from deadpool_run.agent.slurm.discovery import discover
from deadpool_run.agent.spec import LaunchSpec, Mode, Target
from deadpool_run.cli.cluster.slurm_start import start
from deadpool_run.core.settings import Settings

HANDLED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def tell(**fields):
    with Path("told").open("a") as file:
        file.write(json.dumps(fields) + "\n")


def agent():
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    place = discover(os.environ)
    run_dir = Path(os.environ["DEADPOOL_RUN_DIR"])
    tell(
        kind="up",
        node=place.name,
        index=place.step.index,
        nodes=place.step.nodes,
        endpoint=place.endpoint,
        run_dir=str(run_dir),
        run_id=os.environ["DEADPOOL_RUN_ID"],
        token=Path(os.environ["DEADPOOL_TOKEN_FILE"]).read_text(),
        environment="".join(os.environ.values()),
        words=sys.argv[1:],
        gpus=place.gpus,
    )
    if sys.argv[3:] == ["wait"]:
        number = signal.sigwait(HANDLED)
        tell(kind="signal", node=place.name, number=number)
    if place.step.index == 0 and sys.argv[2] != "-":
        folder = run_dir / "nodes" / place.name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"ended": "now", "exit_code": int(sys.argv[2])}))
    sys.exit(int(sys.argv[1]) if place.step.index == len(place.step.nodes) - 1 else 0)


def front():
    place = discover(os.environ)
    spec = LaunchSpec(
        settings=Settings(world_size=1),
        target=Target(Mode.PATH, ("train.py",)),
        nproc_per_node=1,
        run_id=place.run_id,
        run_dir=Path("shared/run").absolute(),
    )
    tell(kind="front", pid=os.getpid(), name=place.name)
    sys.exit(start(place, len(place.nodes), sys.argv[1:], os.environ, spec))


if __name__ == "__main__":
    agent() if "SLURM_STEP_ID" in os.environ else front()
