"""Random search for schedules of an election that break an invariant: new seeds, for every start and mix of faults.

python tests/core/leadership/search_elections.py --minutes 10
python tests/core/leadership/search_elections.py --seed 123456 --start three --mix everything
"""

import argparse
import os
import random
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from election_model import Broken
from election_search import MIXES, MOST, STARTS, Search


def main() -> int:
    """Search, and return 1 if any schedule breaks an invariant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1, help="how many minutes to try new schedules")
    parser.add_argument("--seed", type=int, help="try the schedule of this seed only")
    parser.add_argument("--start", choices=STARTS, help="only schedules from this start")
    parser.add_argument("--mix", choices=MIXES, help="only this mix of faults")
    options = parser.parse_args()
    starts = [options.start] if options.start else list(STARTS)
    mixes = [options.mix] if options.mix else list(MIXES)
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    deadline = time.monotonic() + 60 * options.minutes
    count = failed = 0
    while True:
        for start in starts:
            for mix in mixes:
                count += 1
                try:
                    Search(frozenset(MIXES[mix])).walk(STARTS[start](), random.Random(seed), MOST)
                except Broken as broken:
                    failed += 1
                    again = f"{sys.executable} {__file__} --seed {seed} --start '{start}' --mix '{mix}'"
                    print(f"FAILURE {broken}\n  again: {again}", flush=True)
        if options.seed is not None or time.monotonic() > deadline:
            break
        seed += 1
    print(f"{count} schedules of elections, {failed} failures")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
