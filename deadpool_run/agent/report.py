"""What viewers of a run see: the coordinator's status, and beside it what only this node knows. Pure."""

from collections.abc import Mapping
from typing import Any

from deadpool_run.agent.workforce import Workforce
from deadpool_run.core.membership import State
from deadpool_run.core.settings import Settings
from deadpool_run.vault.board import Board, Cell, Phase

_NS_PER_MS = 1e6


def status_object(
    settings: Settings, state: State, board: Board, workforce: Workforce, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an object fit for JSON."""
    return {
        "run": dict(run),
        "ranks": [{"rank": rank, **_cell(cell)} for rank, cell in enumerate(board.cells)],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    """Return what a rank's worker says of itself; `step` is the one that it works on."""
    return {
        "phase": Phase(cell.phase).name.lower(),
        "step": cell.completed,
        "step_ms": cell.step_ns / _NS_PER_MS,
        "capture_ms": cell.capture_ns / _NS_PER_MS,
        "snapshots": list(cell.held),
    }
