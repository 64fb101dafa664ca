"""Options for several machines: how many, how many of them spare, and how they find each other. Pure, except for the token."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deadpool_run.agent.authority.bounded import BoundedAuthority
from deadpool_run.agent.authority.parse import AGENTS, parse_authority
from deadpool_run.agent.spec import Cluster
from deadpool_run.cli.options.resolve import DETECTED, Values
from deadpool_run.errors import UsageError
from deadpool_run.vault.transfer.streams import MAX_PARTS

DEFAULT_PORT = 29400
"""Of torchrun's c10d rendezvous."""
_SPARES = re.compile(r"([0-9]+)([wn]?)")


@dataclass(frozen=True, slots=True)
class Shape:
    """How the machines of a job are used."""

    nodes: int
    """Those that hold ranks."""
    spare_nodes: int
    spares: int
    """Spare workers, on those that hold ranks."""

    @property
    def machines(self) -> int:
        """All of them, as `--nnodes` counts them."""
        return self.nodes + self.spare_nodes


def shape(values: Values) -> Shape:
    """Return the shape that `--nnodes` and `--spares` ask for. Raises `UsageError`."""
    machines = 1 if values.flag("standalone") else machine_count(values)
    workers, nodes = _spares(values, machines)
    if nodes >= machines:
        advice = "--nnodes counts the spare machines too" if machines > 1 else "spare workers are written 2w, or just 2"
        raise values.refuse("spares", f"no machine of {machines} is left to hold ranks", advice)
    return Shape(machines - nodes, nodes, workers)


def cluster(values: Values, machines: int, host_name: str, token: Callable[[str], bytes]) -> Cluster | None:
    """Return how the machines find each other; None for one machine. `token` reads the token of a file, or the user's own."""
    if machines == 1:
        return None
    authority = _authority(values)
    named = values.words("rdzv_endpoint") or values.text("master_addr")
    return Cluster(
        endpoints=() if _folder(values) or (authority is not None and not named) else _endpoints(values),
        authority=authority,
        meeting=_meeting(values),
        token=token(values.text("token_file")),
        node_name=_node_name(values) or host_name,
        node_rank=values.optional_count("node_rank", 0),
        failure_domain=values.text("topology"),
        bandwidth=values.quantity("replica_bandwidth", "500M or 2G", "KMGT", "(?:i?B)?(?:/s)?"),
        streams=_streams(values),
        own_directory=bool(values.text("run_dir")),
        # A scheduler gives the address of its first node. Machines that the user numbers may meet at any address.
        founds=values["node_rank"].source != DETECTED or values.count("node_rank", 0) == 0,
    )


def _node_name(values: Values) -> str:
    name = values.text("node_name")
    if "/" in name:
        raise values.refuse("node_name", "a directory with the node's records has this name", "write it without /")
    return name


def host_of(endpoint: str) -> tuple[str, str]:
    """Return the host and the port (or nothing) of `host`, `host:port`, `[v6]:port` or a bare IPv6 address."""
    if endpoint.startswith("["):
        host, _, rest = endpoint[1:].partition("]")
        return host, rest.removeprefix(":")
    if endpoint.count(":") > 1:
        return endpoint, ""
    host, _, port = endpoint.partition(":")
    return host, port


def machine_count(values: Values) -> int:
    """Return the number of `--nnodes`; torchrun writes 4 as `4:4` too. Raises `UsageError`."""
    low, _, high = values.text("nnodes").partition(":")
    if not low.isdecimal() or int(low) < 1 or not (high or low).isdecimal():
        raise values.refuse(
            "nnodes", "not a number of machines", "write one number from 1, which counts the spare ones"
        )
    if (high or low) != low:
        advice = f"the number of ranks is fixed: write --nnodes {high} --spares {int(high) - int(low)}n"
        raise values.refuse("nnodes", "two different numbers", advice)
    return int(low)


def _spares(values: Values, machines: int) -> tuple[int, int]:
    """Return spare workers and spare machines. A bare number means machines where there are several."""
    found = {"w": 0, "n": 0}
    for word in values.words("spares"):
        match = _SPARES.fullmatch(word)
        if match is None:
            raise values.refuse(
                "spares", "not a number of spares", "write 2, 2w (workers), 1n (machines) or both: 1n,2w"
            )
        found[match[2] or ("n" if machines > 1 else "w")] += int(match[1])
    return found["w"], found["n"]


def _folder(values: Values) -> str:
    """Return the folder that `--rdzv-endpoint` names; nothing if it names addresses."""
    return values.text("rdzv_endpoint") if values.text("rdzv_endpoint").startswith("/") else ""


def _meeting(values: Values) -> Path | None:
    """Return the folder of an authority's records, and of the run's token, that the agents make if it is missing."""
    if values["authority"].source == DETECTED:
        return Path(values.text("authority").removeprefix("file:"))
    return Path(_folder(values)) if _folder(values) else None


def _authority(values: Values) -> BoundedAuthority | None:
    """Return what decides between two machines. A folder in `--rdzv-endpoint` does so too. Raises `UsageError`."""
    text, folder = values.text("authority"), _folder(values)
    if folder and text not in {"", f"file:{folder}"}:
        raise values.refuse(
            "authority", f"--rdzv-endpoint names {folder}, which records the same", "leave one of them out"
        )
    rendezvous_id = values.text("rdzv_id")
    name = values.text("run_id") or ("" if rendezvous_id == "none" else rendezvous_id)
    if text not in {"", AGENTS} and not name:
        raise values.refuse(
            "authority", "the run has no name", "add --run-id NAME, the same on all machines and new for each run"
        )
    try:
        return parse_authority(text or (f"file:{folder}" if folder else AGENTS), name or "run")
    except UsageError as error:
        raise values.refuse("authority", *str(error).split("\n", 1)) from error


def _endpoints(values: Values) -> tuple[tuple[str, int], ...]:
    words = values.words("rdzv_endpoint")
    if not words and values.text("master_addr"):
        return ((values.text("master_addr"), _port(values, "master_port", values.text("master_port") or "29500")),)
    if not words:
        raise UsageError(
            "--nnodes asks for several machines, but --rdzv-endpoint is not set\n"
            "give all of them the same --rdzv-endpoint HOST:PORT, with an address of the first machine"
        )
    found = []
    for word in words:
        host, port = host_of(word)
        if not host:
            raise values.refuse(
                "rdzv_endpoint", "no host in it", "write HOST:PORT, with an address of the first machine"
            )
        found.append((host, _port(values, "rdzv_endpoint", port or str(DEFAULT_PORT))))
    return tuple(found)


def _port(values: Values, name: str, text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise values.refuse(name, f"{text!r} is not a port", "write a number from 1 to 65535")
    return int(text)


def _streams(values: Values) -> int | None:
    streams = values.optional_count("replica_streams", 1)
    if streams is not None and streams > MAX_PARTS:
        raise values.refuse("replica_streams", "too many", f"write a number from 1 to {MAX_PARTS}")
    return streams
