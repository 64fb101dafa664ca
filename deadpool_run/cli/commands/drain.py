"""`deadpool-run drain`: a rank, or every rank of a machine, moves to spares at a step's end."""

import os
import select
import sys
from typing import Annotated, Any

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.confirm import confirmed
from deadpool_run.cli.runs.client import ControlClient
from deadpool_run.cli.runs.find import RunDir, RunId, connect_run
from deadpool_run.errors import RequestRefusedError, UsageError
from deadpool_run.view.health import Status

_LOOK_S = 1.0


def drain(  # noqa: PLR0913 - one parameter for each option
    target: Annotated[
        str,
        typer.Argument(metavar="[NODE|RANK]", help="A machine's name, or the number of a rank.", show_default=False),
    ] = "",
    *,
    here: Annotated[
        bool, typer.Option("--here", help="The machine of this command. Returns when its agent has ended.")
    ] = False,
    detach: Annotated[bool, typer.Option("--no-wait", help="Return at once, not when the ranks have moved.")] = False,
    run_dir: RunDir = None,
    run_id: RunId = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask, even on a terminal.")] = False,
) -> None:
    """Move a rank, or all ranks of a machine, to spares. No step is repeated. A drained machine leaves the job."""
    if here == bool(target):
        raise UsageError("name exactly one of NODE, RANK and --here\nfor example `deadpool-run drain 1`")
    with connect_run(run_dir, run_id, os.environ) as client:
        status: Status = client.ask({"do": "status"})
        is_rank = target.isdecimal() and target not in {node.get("name") for node in status.get("nodes", ())}
        what = f"rank {target}" if is_rank else f"node {target}" if target else "this machine"
        if not yes:
            confirmed(f"Drain {what} of {client.run_dir.name}?")
        asked = _ask(client, what, {"here": True} if here else {"rank": int(target)} if is_rank else {"node": target})
        what = f"rank {target}" if is_rank else f"node {asked['node']}"
        before = {rank["rank"]: rank["worker"] for rank in status["ranks"] if rank["rank"] in asked["ranks"]}
        if detach:
            tell(f"{what} is being drained: the log of the run reports the end")
        elif here:
            if not _has_left(client, what, asked["node"]):
                raise typer.Exit(1)
        elif not before:
            tell(f"{what} has no ranks: it leaves the job")
        elif not _has_moved(client, what, before, asked["node"]):
            raise typer.Exit(1)


def _ask(client: ControlClient, what: str, target: dict[str, Any]) -> dict[str, Any]:
    try:
        return client.ask({"do": "drain", **target})
    except RequestRefusedError as refusal:
        raise RequestRefusedError(
            f"{what} is not drained: {refusal}\n`deadpool-run status` shows ranks, nodes and spares"
        ) from refusal


def _has_left(client: ControlClient, what: str, node: str) -> bool:
    """Wait for the end of this machine's agent and print the result. Return whether its ranks had moved."""
    agent, ranks = client.agent(), [node]
    try:
        with ControlClient(client.run_dir) as viewer:
            for status in viewer.watch(_LOOK_S):
                ranks = [rank for rank in status.get("ranks", ()) if rank["node"] == node]
                nodes = {each["node"]: each for each in status.get("nodes", ())}
                if node in nodes and not nodes[node]["drained"]:
                    tell(f"{what} is not drained: {status.get('reason') or 'see the log of the run'}")
                    return False
        select.select([agent], [], [])
    finally:
        os.close(agent)
    if ranks:
        tell(f"{what} is not drained: its agent has ended before")
    else:
        sys.stdout.write(f"{what} is drained: its agent has ended\n")
    return not ranks


def _has_moved(client: ControlClient, what: str, before: dict[int, int], node: str | None) -> bool:
    """Wait for the end of the drain and print its result. Return whether the ranks have moved."""
    with ControlClient(client.run_dir) as viewer:
        for status in viewer.watch(_LOOK_S):
            ranks = status.get("ranks", [])
            if status.get("draining") is not None or len(ranks) <= max(before):
                continue
            now = [ranks[rank] for rank in before]
            if all(_is_elsewhere(rank, before, node) for rank in now):
                places = "; ".join(f"rank {rank['rank']}: worker {rank['worker']} on {rank['node']}" for rank in now)
                sys.stdout.write(f"{what} is drained: {places}\n")
                return True
            tell(f"{what} is not drained: {status.get('reason') or 'see the log of the run'}")
            return False
    tell(f"{what} is not drained: the run has ended")
    return False


def _is_elsewhere(rank: dict[str, Any], before: dict[int, int], node: str | None) -> bool:
    return rank["worker"] != before[rank["rank"]] and (node is None or rank["node"] != node)
