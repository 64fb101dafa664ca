"""Writes what it was given to `sys.argv[1]/<rank>.json`, says a line on each stream, ends as its arguments say."""

import json
import os
import sys
from pathlib import Path

rank = os.environ["RANK"]
given = {
    "env": dict(os.environ),
    "argv": sys.argv[1:],
    "path": sys.path[0],
    "flags": list(sys.flags),
    "main": __name__,
    "session": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "torch": "torch" in sys.modules,
    "order": list({"one", "two", "three", "four", "five", "six", "seven", "eight"}),
}
(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(given))
print(f"out of {rank}")
print(f"err of {rank}", file=sys.stderr)
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
