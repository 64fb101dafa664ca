"""Environment that all processes of a job share, and the signals that the agent handles."""

import signal
from collections.abc import Iterable, Mapping
from typing import TypeVar

from deadpool_run.wire import check

_Number = TypeVar("_Number", bound=int)
_OUTER_LAUNCHERS = ("PET_", "TORCHELASTIC_", "DEADPOOL_")
"""Prefixes of an outer launcher's variables, which would misconfigure an inner one."""

_HASH_SEED = "1"
"""A replacement, perhaps on another machine or after a restart, orders sets of strings as the lost rank did. Not 0, which would
change `sys.flags`."""


def base_environment(nproc_per_node: int, outer: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all processes of a job with so many workers on this machine share."""
    env = {
        name: value
        for name, value in outer.items()
        if not name.startswith(_OUTER_LAUNCHERS) or name == check.VARIABLE  # the latter is for our workers
    }
    if _limits_threads(nproc_per_node, outer):
        env["OMP_NUM_THREADS"] = "1"
    if not env.get("PYTHONHASHSEED", "").isdecimal():
        env["PYTHONHASHSEED"] = _HASH_SEED
    return env


def omp_banner(nproc_per_node: int, outer: Mapping[str, str]) -> str | None:
    """Return torchrun's warning, if the user chose no number of threads."""
    if not _limits_threads(nproc_per_node, outer):
        return None
    return (
        f"OMP_NUM_THREADS is not set: each of the {nproc_per_node} workers gets 1, so that together they do not "
        "overload this machine; set it to tune them"
    )


def _limits_threads(nproc_per_node: int, outer: Mapping[str, str]) -> bool:
    """Return whether OMP_NUM_THREADS is set to 1, as torchrun does."""
    return "OMP_NUM_THREADS" not in outer and nproc_per_node > 1


def without_ignored_hangup(numbers: Iterable[_Number]) -> list[_Number]:
    """Return the signals to handle: no SIGHUP where it is ignored, so that a job under nohup outlives its terminal."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if not (under_nohup and number == signal.SIGHUP)]
