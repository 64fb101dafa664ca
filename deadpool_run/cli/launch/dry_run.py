"""The text that `--dry-run` prints. Pure."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence

from deadpool_run.agent.environment import base_environment
from deadpool_run.agent.node.assignment import Assignment, worker_environment
from deadpool_run.agent.spec import LOGS_OFF, LaunchSpec, Mode
from deadpool_run.cli.options.option import Option
from deadpool_run.cli.options.resolve import DEFAULT, Values
from deadpool_run.cli.options.table import OPTIONS
from deadpool_run.core.effects import AssignRank
from deadpool_run.core.events import Place
from deadpool_run.core.state import NodeRecord
from deadpool_run.ids import ONLY_NODE, Epoch, NodeId, Rank, WorkerId
from deadpool_run.text import without_passwords
from deadpool_run.view.memory_plan import Room, lines
from deadpool_run.view.plan import plan_lines
from deadpool_run.wire.peers import Peer, World

_CHOSEN_AT_START = {
    "MASTER_PORT": "<a free port>",
    "DEADPOOL_STORE": "127.0.0.1:<a free port>",
    "TORCHELASTIC_ERROR_FILE": "<log tree>/attempt_0/0/error.json",
}
_CHOSEN_AMONG_NODES = {
    **_CHOSEN_AT_START,
    "MASTER_ADDR": "<the first node's address>",
    "DEADPOOL_STORE": "<the first node's address>:<a free port>",
    "DEADPOOL_NODE": "<the node's name>",
    "DEADPOOL_NODE_ADDR": "<the node's address>",
}


def describe(spec: LaunchSpec, notes: Sequence[str], values: Values, outer: Mapping[str, str], free: int) -> str:
    """Return the resolved options, the map of ranks and spares, memory, the worker's command and its environment.

    `free` is what snapshots and copies may take on this machine, in bytes.
    """
    machines = _machines(values, spec)
    logs = "none" if spec.log_dir == LOGS_OFF else spec.log_dir or spec.run_dir / "logs"
    parts = (
        ("options", set_lines(values)),
        ("notes", notes),
        ("run", (f"run id         {spec.run_id}", f"run directory  {spec.run_dir}", f"logs           {logs}")),
        ("ranks and spares", plan_lines(spec.settings, machines) if spec.cluster else _map_lines(spec)),
        ("memory for snapshots and copies", _memory_lines(values, spec, machines, free)),
        ("command of a worker", (_command_line(spec),)),
        ("environment of rank 0 (beyond what is inherited)", _environment_lines(spec, outer)),
    )
    return "".join(
        f"{title}\n" + "".join(f"  {line}\n" for line in found) for title, each in parts if (found := [*each])
    )


def set_lines(values: Values) -> list[str]:
    """Return the options that are not at their defaults, and where to see the others."""
    chosen = [option for option in OPTIONS if values[option.name].source != DEFAULT]
    return [*settings_lines(values, chosen), "(all others have their defaults: `deadpool-run config show`)"]


def settings_lines(values: Values, options: Sequence[Option] = OPTIONS) -> list[str]:
    """Return each option with its value as in a file, `-` if it is not set, and its source; passwords of URLs are hidden."""
    shown = []
    for option in options:
        text = (
            str(values.flag(option.name)).lower()
            if option.is_flag
            else without_passwords(values.text(option.name)) or "-"
        )
        shown.append((option.flag[2:], text, values[option.name].source))
    name_width = max((len(name) for name, _, _ in shown), default=0)
    text_width = max((len(text) for _, text, _ in shown), default=0)
    return [f"{name:<{name_width}}  {text:<{text_width}}  {source}" for name, text, source in shown]


def _map_lines(spec: LaunchSpec) -> Iterator[str]:
    for rank in range(spec.settings.world_size):
        yield f"rank {rank:<4}  local rank {rank}"
    for spare in range(spec.settings.spares):
        yield f"spare {spare:<3}  for any rank"
    if not spec.settings.spares:
        yield "no spares: a lost rank is started again"


def _machines(values: Values, spec: LaunchSpec) -> list[NodeRecord]:
    """Return the machines in order of arrival, each in its own failure domain."""
    if spec.cluster is None:
        return [NodeRecord(NodeId("this machine"), Place(), 0)]
    machines = values.optional_count("simulate_nodes", 1) or spec.settings.nodes + spec.settings.spare_nodes
    names = [NodeId(f"node {at}") for at in range(machines)]
    return [NodeRecord(name, Place(name=name), at) for at, name in enumerate(names)]


def _memory_lines(values: Values, spec: LaunchSpec, machines: Sequence[NodeRecord], free: int) -> Iterator[str]:
    limit = spec.snapshot_memory
    room = Room(free, "what is free now, less a reserve; the ranks themselves need memory too")
    if 0 < limit < free:
        room = Room(limit, "--snapshot-memory")
    yield from lines(spec.settings, machines, room, values.quantity("simulate_parameters", "350M or 7B"))


def _command_line(spec: LaunchSpec) -> str:
    if not spec.warm:
        return shlex.join(spec.command.argv)
    module = ("-m",) if spec.target.mode is Mode.MODULE else ()
    return f"{shlex.join((spec.python, *module, *spec.target.argv))}  (forked from the fork server)"


def _environment_lines(spec: LaunchSpec, outer: Mapping[str, str]) -> Iterator[str]:
    assignment = Assignment(
        order=AssignRank(WorkerId(0), Rank(0), Epoch(1), replacement=False, local_rank=0),
        world=World(0, 0, "127.0.0.1", 0),
        here=Peer(ONLY_NODE, "127.0.0.1", 0),
        capture_interval=spec.settings.capture_interval,
        error_file="" if spec.log_dir == LOGS_OFF else os.devnull,
        resume=-1,
    )
    chosen = _CHOSEN_AT_START if spec.cluster is None else _CHOSEN_AMONG_NODES
    environment = worker_environment(spec, assignment, base_environment(spec.nproc_per_node, outer))
    for name, value in sorted(environment.items()):
        if value and name in chosen:
            yield f"{name}={chosen[name]}"
        elif outer.get(name) != value:
            yield f"{name}={shlex.quote(value)}"
    yield "(other ranks differ in RANK, LOCAL_RANK, ROLE_RANK, DEADPOOL_WORKER, TORCHELASTIC_ERROR_FILE)"
