"""Random search for bugs in stories of real agents in virtual time.

python tests/sim/shells/search_shells.py --minutes 10
python tests/sim/shells/search_shells.py --seed 123456 --kind hard
"""

import argparse
import itertools
import os
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), *map(str, Path(__file__).parents[1:3])]

from stories import KINDS, tell


def main() -> int:
    """Search, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1, help="how many minutes to run new stories")
    parser.add_argument("--seed", type=int, help="run the story of this seed")
    parser.add_argument("--kind", choices=KINDS, help="only stories of this kind")
    options = parser.parse_args()
    kinds = (options.kind,) if options.kind else KINDS
    if options.seed is not None:
        told = [(options.seed, kind) for kind in kinds]
    else:
        first = int.from_bytes(os.urandom(4), "big")
        told = ((seed, kind) for seed in itertools.count(first) for kind in kinds)
    deadline = time.monotonic() + 60 * options.minutes
    count, failed = 0, []
    for seed, kind in told:
        if options.seed is None and time.monotonic() > deadline:
            break
        count += 1
        try:
            tell(seed, kind)
        except Exception:  # noqa: BLE001 - other exceptions are bugs, too
            failed.append((seed, kind))
            print(
                f"FAILURE {traceback.format_exc()}\n  again: {sys.executable} {__file__} --seed {seed} --kind {kind}",
                flush=True,
            )
    print(f"{count} stories of agents, {len(failed)} failures")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
