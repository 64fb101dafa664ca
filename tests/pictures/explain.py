"""Draw the two pictures of docs/how-recovery-works.md: the processes of a job, and the time line of a repair.

    python tests/pictures/explain.py

The time line is of the repair in docs/pictures/incident.json, an entry of `incidents` of `deadpool-run status --json`.
"""

import json
from pathlib import Path

from svg import GREY, INK, LINE, box, line, picture, text

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
INCIDENT = FOLDER / "incident.json"
WIDTH = 760
BLUE, GREEN, AMBER, RED = "#2563eb", "#16a34a", "#d97706", "#dc2626"
PALE = {BLUE: "#dbeafe", GREEN: "#dcfce7", AMBER: "#fef3c7", RED: "#fee2e2", GREY: "#f3f4f6"}


def labelled(corner, size, words, colour):
    """Return a box with lines of text in it; the first line is bold."""
    (x, y), (width, height) = corner, size
    top = y + height / 2 + 4.5 - 8 * (len(words) - 1)
    return [
        box(x, y, width, height, fill=PALE[colour], stroke=colour),
        *(
            text(
                x + width / 2,
                top + 16 * number,
                each,
                text_anchor="middle",
                font_size=11.5 if number else 12.5,
                font_weight="normal" if number else "bold",
            )
            for number, each in enumerate(words)
        ),
    ]


def arrow(start, end, colour):
    """Return a line with a head at both ends."""
    return line(start, end, stroke=colour, stroke_width=1.6, marker_end="url(#head)", marker_start="url(#head)")


def processes():
    """Return the picture of the processes on three machines."""
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
    )
    parts = [head]
    machines = (
        (16, "machine a", "agent, leads", ("coordinator decides", "snapshots of 0, 1", "copies of 3")),
        (266, "machine b", "agent", ("votes", "snapshots of 2, 3", "copies of 0")),
        (516, "machine c, a spare", "agent", ("votes", "no snapshots", "copies of 1, 2")),
    )
    for number, (x, name, agent, lines) in enumerate(machines):
        parts.append(box(x, 34, 228, 278, rx=6, fill="none", stroke=GREY, stroke_dasharray="4 3"))
        parts.append(text(x + 114, 24, name, text_anchor="middle", font_weight="bold"))
        parts += labelled((x + 14, 50), (200, 84), (agent, *lines), BLUE)
        parts += labelled((x + 14, 146), (200, 42), ("fork server", "has imported torch"), GREY)
        for place in range(2):
            own = ("spare", "no rank yet") if number == 2 else (f"rank {2 * number + place}", "your script")
            parts += labelled((x + 14 + 104 * place, 230), (96, 64), own, AMBER if number == 2 else GREEN)
            middle = x + 62 + 104 * place
            parts.append(line((middle, 188), (middle, 230), stroke=GREY, stroke_width=1.2, marker_end="url(#head)"))
    parts.append(text(70, 213, "forks", font_size=11, fill=GREY, text_anchor="end"))
    for x in (230, 480):
        parts.append(arrow((x + 2, 92), (x + 48, 92), INK))
    parts.append(arrow((230, 262), (280, 262), INK))
    parts += [
        text(
            16, 338, "Agents (blue) start and watch processes, and hold snapshots in memory that outlives the workers."
        ),
        text(
            16,
            358,
            "Between agents: orders, votes and copies of snapshots. Between ranks: collectives, by Gloo or NCCL.",
        ),
        text(16, 378, "A lost rank goes to a spare of its machine; all ranks of a lost machine go to a spare machine."),
    ]
    return picture(WIDTH, 394, "The processes of a job on three machines", parts)


def time_line(incident):
    """Return the picture of one repair."""
    left, right, top = 118, 24, 62
    detected = incident["detected_s"] or 0.0
    ends = {
        name: detected + incident[f"{name}_s"] for name in ("promoted", "aborted", "rehearsed", "restored", "attached")
    }
    end = detected + incident["first_step_s"]
    scale = (WIDTH - left - right) / end

    def bar(row, start, until, words, colour):
        x, width, y = left + start * scale, max(2.0, (until - start) * scale), top + 46 * row
        shown = [box(x, y, width, 32, rx=3, fill=PALE[colour], stroke=colour)]
        if width > 7 * len(words):
            shown.append(text(x + width / 2, y + 20, words, text_anchor="middle", font_size=12))
        return shown

    lost = incident["losses"][0]
    parts = [
        text(16, 26, "One repair: kill -9 of a rank, a warm spare, 4 ranks", font_size=16, font_weight="bold"),
        text(16, 45, f"{1e3 * end:.0f} ms from the kill to the first step of all ranks, on a busy machine", fill=GREY),
    ]
    for row, name in enumerate(("the agent", "survivors", "the spare", "all ranks")):
        parts.append(text(left - 10, top + 46 * row + 20, name, text_anchor="end"))
    parts += bar(0, 0, detected, "detect", RED)
    parts += bar(1, detected, ends["aborted"], "abort", AMBER)
    parts += bar(1, ends["aborted"], ends["rehearsed"], "wait: processes and weights stay", GREY)
    parts += bar(2, ends["promoted"], ends["rehearsed"], "rehearse: set-up and two steps", BLUE)
    parts += bar(3, ends["rehearsed"], ends["restored"], "restore", BLUE)
    parts += bar(3, ends["restored"], ends["attached"], "attach", GREEN)
    parts += bar(3, ends["attached"], end, "first step", GREEN)
    under = {"text_anchor": "end", "font_size": 11, "fill": GREY}
    parts.append(text(left + ends["attached"] * scale, top + 188, "restore, attach", **under))
    parts.append(line((left, top - 8), (left, top + 180), stroke=INK))
    parts.append(line((left + detected * scale, top - 8), (left + detected * scale, top + 180), stroke=LINE))
    parts.append(
        text(
            16,
            top + 216,
            f"Rank {lost['rank']} {lost['cause']}; it resumed at step {incident['resumed']}, "
            f"{incident['steps_repeated']} steps were repeated.",
            font_size=11,
            fill=GREY,
        )
    )
    return picture(WIDTH, top + 230, "The time line of a repair", parts)


def pictures():
    """Return both pictures by file name."""
    incident = json.loads(INCIDENT.read_text(encoding="utf-8"))
    return {"processes.svg": processes(), "time-line.svg": time_line(incident)}


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")
