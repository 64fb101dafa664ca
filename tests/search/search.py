"""Random search for wrong weights: draws jobs (a loop, a layout, faults), runs them, and compares each to an unfailed run.

python tests/search/search.py --minutes 10            # new seeds
python tests/search/search.py --seed 123456           # the job of this seed
python tests/search/search.py --job .search/123456/job.json   # an edited job
"""

import argparse
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from draw import Job, draw
from trial import Verdict, run

EVIDENCE = Path(".search")


def new_seed() -> int:
    """Return a random seed."""
    return int.from_bytes(os.urandom(5), "big")


def show(verdict: Verdict, took_s: float) -> None:
    """Print one line for a job. For a failure, print also the commands that repeat it."""
    job = verdict.job
    kind = job.loop.get("item") or job.loop["wrap"]
    breach = f", {job.breach}" if job.breach else ""
    faults = len(job.deaths) + len(job.strikes)
    print(
        f"{'FAILURE ' if verdict.failed else ''}seed {job.seed}: {verdict.outcome}"
        f" ({kind}{breach}, {job.ranks} ranks, {verdict.happened} of {faults} faults, {took_s:.0f} s)",
        flush=True,
    )
    if verdict.failed:
        print(f"  {verdict.words.splitlines()[0][:300] if verdict.words else ''}")
        print(
            f"  again: {sys.executable} tests/search/search.py --seed {job.seed}; kept: {EVIDENCE / str(job.seed)}",
            flush=True,
        )
    elif verdict.outcome != "exact":
        print(f"  {verdict.words[:200]}")


def search(jobs: list[Job], minutes: float, at_once: int) -> list[Verdict]:
    """Run the jobs, or draw and run jobs until the time is over. Return the verdicts."""
    deadline = time.monotonic() + 60 * minutes
    verdicts: list[Verdict] = []
    begun: dict[Future[Verdict], float] = {}
    fixed = list(jobs)
    with ThreadPoolExecutor(at_once) as pool:
        while True:
            while len(begun) < at_once and (fixed or (not jobs and time.monotonic() < deadline)):
                job = fixed.pop(0) if fixed else draw(new_seed())
                begun[pool.submit(run, job, EVIDENCE / str(job.seed))] = time.monotonic()
            if not begun:
                return verdicts
            for done in wait(begun, return_when=FIRST_COMPLETED).done:
                verdicts.append(done.result())
                show(verdicts[-1], time.monotonic() - begun.pop(done))


def main() -> int:
    """Search, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how many minutes to draw and run jobs")
    parser.add_argument("--seed", type=int, action="append", default=[], help="run the job of this seed; repeatable")
    parser.add_argument("--job", type=Path, action="append", default=[], help="run the job in this file; repeatable")
    parser.add_argument("--times", type=int, default=1, help="how often to run each of these jobs")
    parser.add_argument("--at-once", type=int, default=1, help="how many jobs run at the same time; 0 means 1")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    read = [Job.from_json(path.read_text(encoding="utf-8")) for path in options.job]
    verdicts = search([*map(draw, options.seed), *read] * options.times, options.minutes, max(1, options.at_once))
    counts = Counter("failures" if each.failed else each.outcome for each in verdicts)
    happened = sum(each.happened for each in verdicts)
    parts = [f"{counts[name]} {name}" for name in ("exact", "refused", "stopped", "failures")]
    print(f"{len(verdicts)} jobs with {happened} faults: {', '.join(parts)}")
    if failures := sorted(each.job.seed for each in verdicts if each.failed):
        print(f"seeds of the failures: {' '.join(map(str, failures))}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
