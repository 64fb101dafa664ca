"""Record a real run in which a rank is killed, and draw its terminal: docs/pictures/recovery.svg.

    python tests/pictures/terminal.py [--ranks 4] [--steps 400] [--lines recording.json]

Run it again when messages have changed. `--lines` keeps the recording, or draws one that is there, without a run.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text
from svg import terminal_format

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes" / "gpt"))

from demo import Training

PICTURE = ROOT / "docs" / "pictures" / "recovery.svg"
WIDTH = 118
OURS = "deadpool-run: "
EQUAL = "equal to a run without a kill"
MARGIN = " " * 10


class Recorded(Training):
    """A run of the demo's script whose output is kept with the time of each line."""

    def __init__(self, args, home):
        self.lines, self.started = [], time.monotonic()
        super().__init__(args, home)

    def note(self, line):
        self.lines.append((time.monotonic() - self.started, line))

    def _show(self):
        for line in self.process.stdout:
            if not line.startswith(("digest ", "W1", "/")):
                self.note(line.rstrip())


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--victim", type=int, default=2, help="the rank to kill")
    parser.add_argument("--lines", type=Path, help="the recording: read if it exists, else written")
    args = parser.parse_args()
    args.spares, args.parallel, args.limit_s = 1, "ddp", 600.0
    return args


def record(args, home):
    """Run the script twice, the second time with a kill; return the lines of the second run, with their times."""
    with Recorded(args, home / "unfailed") as training:
        expected = training.finish()
    with Recorded(args, home / "killed") as training:
        command = f"deadpool-run --nproc-per-node {args.ranks} --spares 1 train.py --steps {args.steps}"
        training.lines.insert(0, (0.0, f"$ {command}"))
        training.reach(args.steps // 3)
        before = training.owners()
        training.note(f"$ kill -9 {before[args.victim]}    # rank {args.victim}, from another terminal")
        os.kill(before[args.victim], signal.SIGKILL)
        found = training.finish()
        after = training.owners()
    lines = training.lines
    ended = lines[-1][0]
    lines.append((ended, "$ # each rank's process, and the SHA-256 of its weights and optimizer state at the end"))
    for rank, pids in enumerate(zip(before, after, strict=True)):
        lives = "the same process" if pids[0] == pids[1] else f"before: {pids[0]}"
        same = EQUAL if expected[rank] == found[rank] else "DIFFERENT"
        lines.append((ended, f"rank {rank}  pid {pids[1]} {f'({lives})':18}  {found[rank][:16]}  {same}"))
    return lines


def styled(seconds, line):
    """Return a line as the picture shows it: the time, then the text with the colour of its speaker."""
    if line.startswith("$ "):
        style = "bold #ffffff"
    elif line.startswith(OURS):
        style = "#67d7f5"
    elif line.endswith(EQUAL):
        style = "#7ee787"
    else:
        style = "#c9d1d9"
    first, *rest = textwrap.wrap(line, WIDTH - len(MARGIN), subsequent_indent="  ", replace_whitespace=False)
    text = Text.assemble((f"{seconds:6.2f} s  ", "#8b949e"), (first, style))
    for more in rest:
        text.append(f"\n{MARGIN}{more}", style)
    return text


def draw(lines, path):
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        for seconds, line in lines:
            console.print(styled(seconds, line))
    path.parent.mkdir(exist_ok=True)
    console.save_svg(str(path), title="kill -9 of a rank", code_format=terminal_format(), unique_id="recovery")


def main():
    args = options()
    if args.lines and args.lines.exists():
        lines = json.loads(args.lines.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory(prefix="deadpool-picture-") as home:
            lines = record(args, Path(home))
    if args.lines:
        args.lines.write_text(json.dumps(lines, indent=1), encoding="utf-8")
    draw(lines, PICTURE)


if __name__ == "__main__":
    main()
