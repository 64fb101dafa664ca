"""The checks of this machine. They start no process and leave no file."""

import os
import platform
import resource
import socket
import tempfile
from collections.abc import Iterator, Mapping
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

_FILES = 4096
_PROCESSES = 1024
_SMALL_ROOM = 1 << 30


class Grade(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """A run may work, with the limit that the text names."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check, and what to do."""

    grade: Grade
    name: str
    text: str


def findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is found, in the order of the checks."""
    yield _versions()
    yield _kernel()
    gpus, cpus = count_gpus(environment, DEVICES), len(os.sched_getaffinity(0))
    yield Finding(Grade.OK, "machine", f"{socket.gethostname()}: {cpus} usable CPUs, {gpus} GPUs")
    yield _limit("open files", resource.RLIMIT_NOFILE, _FILES, "LimitNOFILE= of a systemd unit, ulimit -n")
    yield _limit("processes", resource.RLIMIT_NPROC, _PROCESSES, "ulimit -u")
    yield _memory(cpus)
    yield _state_dir(state_dir(environment))
    yield _token(environment)
    yield _port(DEFAULT_PORT)
    yield _own_name()
    yield from (Finding(Grade.NOTE, "variables", text) for text in unknown_variables(environment))


def _versions() -> Finding:
    versions = {name: installed_version(name) for name in ("deadpool-run", "torch")}
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    missing = [name for name, version in versions.items() if version.startswith("(")]
    if missing:
        return Finding(Grade.BAD, "versions", f"{text}: install {' and '.join(missing)}")
    return Finding(Grade.OK, "versions", f"{text}, Python {platform.python_version()}")


def _kernel() -> Finding:
    name = f"Linux {platform.release()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("doctor"))
    except (OSError, AttributeError) as error:
        return Finding(
            Grade.BAD, "kernel", f"{name} does not let a process use pidfd or memfd ({error}): 5.3 or later is needed"
        )
    return Finding(Grade.OK, "kernel", f"{name}, with pidfd and memfd")


def _limit(name: str, number: int, enough: int, how: str) -> Finding:
    _, most = resource.getrlimit(number)
    if most == resource.RLIM_INFINITY:
        return Finding(Grade.OK, name, "no limit")
    if most >= enough:
        return Finding(Grade.OK, name, f"at most {most}")
    return Finding(Grade.NOTE, name, f"at most {most}, which is few for many ranks: raise the hard limit ({how})")


def _memory(workers: int) -> Finding:
    free = room(workers)
    text = f"{size(max(0, free))} are free for snapshots and copies; --dry-run --simulate-parameters shows what a model needs"
    return Finding(Grade.OK if free >= _SMALL_ROOM else Grade.NOTE, "memory", text)


def _state_dir(folder: Path) -> Finding:
    at = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=at):
            pass
    except OSError as error:
        return Finding(
            Grade.BAD,
            "run directories",
            f"{at} cannot be written: {error.strerror}: set XDG_STATE_HOME, or use --run-dir",
        )
    return Finding(Grade.OK, "run directories", f"below {folder}")


def _token(environment: Mapping[str, str]) -> Finding:
    own = state_dir(environment) / "token"
    if environment.get("DEADPOOL_TOKEN"):
        return Finding(Grade.OK, "token", "DEADPOOL_TOKEN is set")
    if not own.exists():
        return Finding(Grade.OK, "token", f"none yet: the first run of several machines creates {own}")
    try:
        read_token(own)
    except UsageError as error:
        return Finding(Grade.BAD, "token", str(error).replace("\n", ": "))
    return Finding(Grade.OK, "token", f"{own}; machines with another home directory need the same one")


def _port(number: int) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind(("", number))
        except OSError as error:
            text = f"{number}, the default of --rdzv-endpoint, cannot be used ({error.strerror}): give another to several machines"
            return Finding(Grade.NOTE, "port", text)
    return Finding(Grade.OK, "port", f"{number}, the default of --rdzv-endpoint, is free")


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Finding(
            Grade.NOTE, "own name", f"{name} has no address ({error.strerror}): use an address in --rdzv-endpoint"
        )
    return Finding(Grade.OK, "own name", f"{name} is {', '.join(addresses)}")
