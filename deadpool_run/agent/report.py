"""What viewers of a run see: the coordinator's summary, and beside it what only this node knows. Pure."""

from collections.abc import Mapping
from typing import Any

from deadpool_run.core import status
from deadpool_run.core.membership import State
from deadpool_run.vault.board import Board, Cell, Phase

SCHEMA_VERSION = 1
_NS_PER_MS = 1e6


def status_object(
    state: State, board: Board, run: Mapping[str, Any], durable: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return an object fit for JSON; see `coordinator.control` for its shape."""
    summary = status.summary(state).to_json()
    ranks = [{**rank, **_cell(cell)} for rank, cell in zip(summary["ranks"], board.cells, strict=True)]
    return {
        "schema_version": SCHEMA_VERSION,
        "run": dict(run),
        **summary,
        "ranks": ranks,
        "committed": board.committed(),
        "durable": None if durable is None else dict(durable),
    }


def _cell(cell: Cell) -> dict[str, Any]:
    """Return what a rank's worker last said of itself on the board."""
    return {
        "activity": Phase(cell.phase).name.lower(),
        "step": cell.completed,
        "step_ms": cell.step_ns / _NS_PER_MS,
        "capture_ms": cell.capture_ns / _NS_PER_MS,
        "snapshots": list(cell.held),
    }
