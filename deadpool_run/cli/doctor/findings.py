"""The checks of this machine. They start no process and leave no file."""

import os
import platform
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from deadpool_run.agent.console import installed_version
from deadpool_run.cli.cluster.nodes import DEFAULT_PORT
from deadpool_run.cli.options.machine import DEVICES, count_gpus, read_token, state_dir
from deadpool_run.cli.options.resolve import unknown_variables
from deadpool_run.errors import UsageError
from deadpool_run.text import size
from deadpool_run.vault.headroom import room

_OURS = ("DEADPOOL_", "PET_")
_FILES = 4096
_PROCESSES = 1024
_SMALL_ROOM = 1 << 30


class Grade(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """A run works, within the limit that the text names."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check, and what to do."""

    grade: Grade
    name: str
    text: str


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run of the doctor's own: without the user's options for runs."""
    return {name: value for name, value in environment.items() if not name.startswith(_OURS)}


def findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the finding of each check, in order."""
    checks: Mapping[str, Callable[[], tuple[Grade, str]]] = {
        "versions": _versions,
        "kernel": _kernel,
        "machine": lambda: _machine(environment),
        "open files": lambda: _limit(resource.RLIMIT_NOFILE, _FILES, "LimitNOFILE= of a systemd unit, ulimit -n"),
        "processes": lambda: _limit(resource.RLIMIT_NPROC, _PROCESSES, "ulimit -u"),
        "memory": _memory,
        "run directories": lambda: _state_dir(state_dir(environment)),
        "token": lambda: _token(environment),
        "port": lambda: _port(DEFAULT_PORT),
        "own name": _own_name,
    }
    for name, check in checks.items():
        grade, text = check()
        yield Finding(grade, name, text)
    yield from (Finding(Grade.NOTE, "variables", text) for text in unknown_variables(environment))


def _versions() -> tuple[Grade, str]:
    versions = {name: installed_version(name) for name in ("deadpool-run", "torch")}
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    missing = [name for name, version in versions.items() if version.startswith("(")]
    if missing:
        return Grade.BAD, f"{text}: install {' and '.join(missing)}"
    return Grade.OK, f"{text}, Python {platform.python_version()}"


def _kernel() -> tuple[Grade, str]:
    name = f"Linux {platform.release()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("doctor"))
    except (OSError, AttributeError) as error:
        return Grade.BAD, f"{name} does not let a process use pidfd or memfd ({error}): 5.3 or later is needed"
    return Grade.OK, f"{name}, with pidfd and memfd"


def _machine(environment: Mapping[str, str]) -> tuple[Grade, str]:
    gpus, cpus = count_gpus(environment, DEVICES), len(os.sched_getaffinity(0))
    return Grade.OK, f"{socket.gethostname()}: {cpus} usable CPUs, {gpus} GPUs"


def _limit(number: int, enough: int, how: str) -> tuple[Grade, str]:
    _, most = resource.getrlimit(number)
    if most == resource.RLIM_INFINITY:
        return Grade.OK, "no limit"
    if most >= enough:
        return Grade.OK, f"at most {most}"
    return Grade.NOTE, f"at most {most}, which is few for many ranks: raise the hard limit ({how})"


def _memory() -> tuple[Grade, str]:
    free = room(len(os.sched_getaffinity(0)))
    text = f"{size(max(0, free))} are free for snapshots and copies; --dry-run --simulate-parameters shows what a model needs"
    return Grade.OK if free >= _SMALL_ROOM else Grade.NOTE, text


def _state_dir(folder: Path) -> tuple[Grade, str]:
    at = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=at):
            pass
    except OSError as error:
        return Grade.BAD, f"{at} cannot be written: {error.strerror}: set XDG_STATE_HOME, or use --run-dir"
    return Grade.OK, f"below {folder}"


def _token(environment: Mapping[str, str]) -> tuple[Grade, str]:
    own = state_dir(environment) / "token"
    if environment.get("DEADPOOL_TOKEN"):
        return Grade.OK, "DEADPOOL_TOKEN is set"
    if not own.exists():
        return Grade.OK, f"none yet: the first run of several machines creates {own}"
    try:
        read_token(own)
    except UsageError as error:
        return Grade.BAD, str(error).replace("\n", ": ")
    return Grade.OK, f"{own}; machines with another home directory need the same one"


def _port(number: int) -> tuple[Grade, str]:
    with socket.socket() as probe:
        try:
            probe.bind(("", number))
        except OSError as error:
            text = f"{number}, the default of --rdzv-endpoint, cannot be used ({error.strerror}): give another to several machines"
            return Grade.NOTE, text
    return Grade.OK, f"{number}, the default of --rdzv-endpoint, is free"


def _own_name() -> tuple[Grade, str]:
    name = socket.gethostname()
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Grade.NOTE, f"{name} has no address ({error.strerror}): use an address in --rdzv-endpoint"
    return Grade.OK, f"{name} is {', '.join(addresses)}"
