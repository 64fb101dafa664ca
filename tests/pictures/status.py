"""Draw the live status: docs/pictures/status-512.svg and status-repair.svg.

    python tests/pictures/status.py

The jobs are simulated; the screens are those of `deadpool-run status` for them. Run it again when the screen has changed.
"""

import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.text import Text
from svg import terminal_format

from deadpool_run.cli.runs.events import Event
from deadpool_run.cli.screen.page import ScreenSize, screen_lines
from deadpool_run.cli.screen.state import RankOrder, ScreenState

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
os.environ["TZ"] = "UTC"
time.tzset()
NOW = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)
SLOW = 301
INCIDENT = {
    "epoch": 2,
    "resumed": 11841,
    "steps_repeated": 1,
    "detected_s": 0.004,
    "aborted_s": 0.12,
    "promoted_s": 0.001,
    "rehearsed_s": 0.61,
    "restored_s": 0.8,
    "attached_s": 0.95,
    "first_step_s": 1.36,
    "ended": (NOW - timedelta(minutes=2, seconds=17)).isoformat(),
    "losses": [
        {
            "rank": 77,
            "worker": 77,
            "cause": "was killed by SIGKILL",
            "injected": True,
            "replacement": 512,
            "from_spare": True,
        }
    ],
}


def job(ranks, per_node, **changed):
    entries = [
        {
            "rank": rank,
            "worker": 512 if rank == 77 else rank,
            "pid": 21000 + rank,
            "phase": "running",
            "activity": "step",
            "step": 12400,
            "step_ms": 322.5 + rank % 3 / 10,
            "snapshots": [12399, 12400],
            "node": f"gpu{rank // per_node:03}",
            "local_rank": rank % per_node,
            "waiting": False,
            "cpu_cores": 1.02 + rank % 5 / 100,
            "memory_bytes": 3.41e9 + rank % 7 * 1e7,
            "gpu_percent": 96 + rank % 4,
            "gpu_memory_bytes": 61.3e9,
        }
        for rank in range(ranks)
    ]
    nodes = [{"node": f"gpu{node:03}"} for node in range(ranks // per_node)]
    spares = [{"worker": 600 + number, "pid": 400 + number, "phase": "ready", "node": "gpu064"} for number in range(8)]
    return {
        "phase": "running",
        "epoch": 2,
        "managed": True,
        "total_steps": 50000,
        "ranks": entries,
        "nodes": nodes,
        "spares": spares,
        "committed": 12399,
        "coordinator": {"node": "gpu000", "term": 0},
        "incidents": [INCIDENT],
        "cost": {"repairs": 1, "steps_repeated": 1, "lost_s": 1.4, "goodput": 0.9997},
        "run": {
            "run_id": "gpt-7b",
            "world_size": ranks,
            "nodes": len(nodes),
            "spares": 8,
            "started": (NOW - timedelta(minutes=66)).isoformat(),
        },
        **changed,
    }


def looked_at(make, looks=30):
    """Return the state of a viewer that has seen the job for a while: ranks wait, the slow one does not."""
    state = ScreenState(make())
    for look in range(looks):
        status = make()
        for rank in status["ranks"]:
            rank["waiting"] = rank["rank"] != SLOW and (rank["rank"] * 7 + look) % 4 != 0
        state.note(status)
    return state


def of_512():
    state = looked_at(lambda: job(512, 8))
    state.order, state.selected = RankOrder.SLOWEST, SLOW
    return state


def in_repair():
    def make():
        status = job(64, 8, phase="repairing", reason="rank 5 (worker 5) was killed by SIGSEGV", epoch=3)
        for rank in status["ranks"]:
            rank |= {"phase": "aborted", "activity": "aborted"}
        status["ranks"][5] |= {"phase": "rehearsing", "activity": "rehearsal", "worker": 608, "step": 0, "step_ms": 0}
        return status

    state = looked_at(make, 1)
    state.order, state.selected = RankOrder.NODE, 5
    told = (
        (139, "rank 77 (worker 77) was killed by SIGKILL: spare worker 512 takes it"),
        (0.4, "rank 5 (worker 5) was killed by SIGSEGV: spare worker 608 takes it"),
    )
    state.events = [Event(NOW - timedelta(seconds=ago), text) for ago, text in told]
    return state


def draw(state, columns, lines, path, title):
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in screen_lines(state, NOW, ScreenSize(columns, lines, "truecolor"), lambda *_: []):
            console.print(Text.from_ansi(line), no_wrap=True, overflow="crop")
    path.parent.mkdir(exist_ok=True)
    console.save_svg(str(path), title=title, code_format=terminal_format(), unique_id=path.stem)


def main(folder=PICTURES):
    draw(of_512(), 80, 24, folder / "status-512.svg", "deadpool-run status")
    draw(in_repair(), 120, 30, folder / "status-repair.svg", "deadpool-run status, in a repair")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
