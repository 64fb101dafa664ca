"""`deadpool-run drain`: a rank, or every rank of a machine, moves to spares at a step's end."""

import os
import sys
from typing import Annotated, Any

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.confirm import confirmed
from deadpool_run.cli.runs.client import ControlClient
from deadpool_run.cli.runs.find import RunDir, RunId, connect_run
from deadpool_run.errors import RequestRefusedError
from deadpool_run.view.health import Status

_LOOK_S = 1.0


def drain(
    target: Annotated[str, typer.Argument(metavar="NODE|RANK", help="A machine's name, or the number of a rank.")],
    *,
    detach: Annotated[bool, typer.Option("--no-wait", help="Return at once, not when the ranks have moved.")] = False,
    run_dir: RunDir = None,
    run_id: RunId = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask, even on a terminal.")] = False,
) -> None:
    """Move a rank, or all ranks of a machine, to spares. No step is repeated. A drained machine leaves the job."""
    with connect_run(run_dir, run_id, os.environ) as client:
        status: Status = client.ask({"do": "status"})
        is_rank = target.isdecimal() and target not in {node.get("name") for node in status.get("nodes", ())}
        what = f"rank {target}" if is_rank else f"node {target}"
        if not yes:
            confirmed(f"Drain {what} of {client.run_dir.name}?")
        try:
            asked = client.ask({"do": "drain", **({"rank": int(target)} if is_rank else {"node": target})})
        except RequestRefusedError as refusal:
            raise RequestRefusedError(
                f"{what} is not drained: {refusal}\n`deadpool-run status` shows ranks, nodes and spares"
            ) from refusal
        before = {rank["rank"]: rank["worker"] for rank in status["ranks"] if rank["rank"] in asked["ranks"]}
        if not before:
            tell(f"{what} has no ranks: it leaves the job")
        elif detach:
            tell(f"{what} is being drained: the log of the run reports the end")
        elif not _has_moved(client, what, before, asked["node"]):
            raise typer.Exit(1)


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
