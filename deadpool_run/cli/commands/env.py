"""`deadpool-run env`: versions and variables for a bug report."""

import os
import platform
import re
import sys

from deadpool_run.agent.console import installed_version
from deadpool_run.cli.options.machine import DEVICES, count_gpus
from deadpool_run.text import without_passwords
from deadpool_run.view.collectives import described, expected

_PACKAGES = ("deadpool-run", "torch", "msgspec", "numpy", "psutil", "rich", "typer", "PyYAML")
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW", re.IGNORECASE)
_PREFIXES = ("DEADPOOL_", "PET_", "TORCH", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MASTER_", "SLURM_J", "SLURM_N")


def env() -> None:
    """Print versions and variables for a bug report, without secrets."""
    gpus = count_gpus(os.environ, DEVICES)
    library = expected(installed_version("torch"), gpus, os.environ)
    lines = [f"{name:<14}{installed_version(name)}" for name in _PACKAGES]
    lines += [
        f"{'python':<14}{platform.python_version()} ({sys.executable})",
        f"{'system':<14}{platform.platform()}",
        f"{'CPUs':<14}{os.cpu_count()}, {len(os.sched_getaffinity(0))} usable",
        f"{'GPUs':<14}{gpus}",
        f"{'collectives':<14}gloo on CPUs{f', {described(library)} on GPUs' if library else ''}",
    ]
    shown = sorted((name, value) for name, value in os.environ.items() if name.startswith(_PREFIXES))
    lines += [f"{name}={'<set>' if _SECRET.search(name) else without_passwords(value)}" for name, value in shown]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
