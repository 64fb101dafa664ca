"""Facts about this machine (GPUs, CPUs, addresses, token), found without importing torch."""

import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from pathlib import Path

from deadpool_run.agent import atomic_file
from deadpool_run.agent.console import installed_version
from deadpool_run.agent.numa import BindingMode, Machine
from deadpool_run.errors import UsageError

DEVICES = Path("/dev")
_MIN_TOKEN_BYTES, _MAX_TOKEN_BYTES = 16, 4096
"""128 bits at least, if the token is random. Its text may have fewer in each byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Facts about this machine that option values depend on."""

    environment: Mapping[str, str]
    cpus: int
    gpus: int
    host_names: frozenset[str]
    """Names and addresses of this machine that an endpoint may use."""
    bind: Callable[[BindingMode, int], Mapping[int, frozenset[int]]] = lambda _mode, _ranks: {}
    """Returns the CPUs near the GPU of each local rank, given the number of ranks."""
    state_dir: Path
    """Default parent of run directories."""
    fresh_run_id: str
    """Name of the run if the user gives none."""
    host_name: str = "localhost"
    """Name of this machine in its scheduler, else its own."""
    plugins: Callable[[str], frozenset[str]] = lambda _: frozenset()
    """Returns the entry points of a group, such as torchrun's plugins."""
    token: Callable[[str], bytes] = lambda _: b""
    """Reads the job's token from the named file; without a name, from the environment or the user's own file."""


def look_around(environment: Mapping[str, str]) -> Surroundings:
    """Return the facts about this machine."""
    return Surroundings(
        environment=environment,
        # As torchrun counts them: a batch system or taskset may leave fewer than there are.
        cpus=len(os.sched_getaffinity(0)),
        gpus=0 if installed_version("torch").endswith("+cpu") else count_gpus(environment, DEVICES),
        host_names=_host_names(),
        bind=lambda mode, ranks: Machine(environment.get("CUDA_VISIBLE_DEVICES")).bind(mode, ranks),
        state_dir=state_dir(environment),
        fresh_run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        host_name=environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0],
        plugins=lambda group: frozenset(metadata.entry_points(group=group).names),
        token=lambda name: find_token(name, environment),
    )


def find_token(name: str, environment: Mapping[str, str]) -> bytes:
    """Return the token of the named file, else DEADPOOL_TOKEN, else that of the user's own file. Raises `UsageError`.

    The user's file is created when first needed, with mode 0600. Machines that share a home directory share it.
    """
    if name:
        return read_token(Path(name))
    if environment.get("DEADPOOL_TOKEN"):
        return _long_enough(os.fsencode(environment["DEADPOOL_TOKEN"]), "DEADPOOL_TOKEN", "export DEADPOOL_TOKEN=$({})")
    path = state_dir(environment) / "token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_file.create(path, secrets.token_hex(32))
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}\nset DEADPOOL_TOKEN or --token-file to the same token on every machine"
        ) from error
    return read_token(path)


def existing_token(name: str) -> bytes:
    """Return the token of the named file; empty without a name. Creates nothing. Raises `UsageError`."""
    return read_token(Path(name)) if name else b""


def count_gpus(environment: Mapping[str, str], devices: Path) -> int:
    """Return the number of GPUs that CUDA will show, from device nodes and CUDA_VISIBLE_DEVICES.

    NVIDIA_VISIBLE_DEVICES is not read: the container runtime created the device nodes from it, and CUDA itself
    ignores it.
    """
    nodes = sum(1 for node in devices.iterdir() if re.fullmatch(r"nvidia[0-9]+", node.name))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return nodes
    words = (word.strip() for word in visible.split(","))
    # CUDA stops at the first entry that is not a device.
    shown = takewhile(lambda word: word and not word.startswith("-"), words)
    return min(nodes, len(list(shown)))


def _host_names() -> frozenset[str]:
    import psutil  # noqa: PLC0415 - help and status don't need it

    name = socket.gethostname()
    numbers = {
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in {socket.AF_INET, socket.AF_INET6}
    }
    return frozenset({"localhost", "0.0.0.0", "::", name, name.partition(".")[0]} | numbers)  # noqa: S104 - compared, not bound


def state_dir(environment: Mapping[str, str]) -> Path:
    """Return the parent of run directories: the state directory of the XDG base directory specification."""
    return xdg_dir(environment, "XDG_STATE_HOME", ".local/state") / "deadpool-run"


def xdg_dir(environment: Mapping[str, str], variable: str, below_home: str) -> Path:
    """Return a base directory of the XDG specification, which says to ignore relative values."""
    given = Path(environment.get(variable, ""))
    home = Path(environment["HOME"]) if environment.get("HOME") else Path.home()
    return given if given.is_absolute() else home / below_home


def read_token(path: Path) -> bytes:
    """Return the token of a file that no other user can read. Raises `UsageError`."""
    what = f"token file {path}"
    try:
        with path.open("rb") as file:
            check_private(os.fstat(file.fileno()), path, os.getuid())
            token = file.read(_MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}\nname another file with --token-file") from error
    if len(token) > _MAX_TOKEN_BYTES:
        raise UsageError(f"{what} is larger than {_MAX_TOKEN_BYTES} bytes\nname another file with --token-file")
    return _long_enough(token, what, f"(umask 077; {{}} > {path})")


def _long_enough(token: bytes, what: str, command: str) -> bytes:
    """Refuse a token that can be guessed. `command` makes another one, with the place of the random part as `{}`."""
    if len(token) < _MIN_TOKEN_BYTES:
        raise UsageError(
            f"{what} has {len(token)} bytes: at least {_MIN_TOKEN_BYTES} are needed, so that it cannot be guessed\n"
            f"make a random one and give it to every machine: {command.format('openssl rand -hex 32')}"
        )
    return token


def check_private(status: os.stat_result, path: Path, me: int) -> None:
    """Refuse a file that users other than `me` own or can read. A group may read a file of root: an administrator has chosen the group."""
    if not stat.S_ISREG(status.st_mode):
        return  # a pipe of the shell
    if status.st_uid not in {me, 0}:
        raise UsageError(
            f"token file {path} is owned by user {status.st_uid}, who can read it and change it\ncopy it to a file of your own"
        )
    readers = status.st_mode & (0o077 if status.st_uid == me else 0o037)
    if readers:
        raise UsageError(
            f"token file {path} has mode {stat.S_IMODE(status.st_mode):04o}: other users can read it or change it\n"
            f"run: chmod 600 {path}"
        )
