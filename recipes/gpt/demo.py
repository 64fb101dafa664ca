"""Train a small GPT twice, the second time with a rank killed on the way, and compare the final weights bit for bit.

This is `make demo`. Exit code 0: every rank's weights and optimizer state are the same in both runs; 1: they are not.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAUNCHER = (sys.executable, "-m", "deadpool_run")


class DemoError(Exception):
    """The demonstration could not be carried out."""


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1, help="one after another, over the run")
    parser.add_argument("--rank", type=int, help="the rank to kill; if not given, the last, then the one before, ...")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--limit-s", type=float, default=180.0, help="give up on a run after this time")
    args = parser.parse_args()
    if args.rank is not None and not 0 <= args.rank < args.ranks:
        parser.error(f"--rank {args.rank} is not one of the {args.ranks} ranks")
    if not 0 <= args.kills < args.steps // 20:
        parser.error("--kills needs at least 20 steps a kill: give more --steps")
    return args


class Training:
    """One run of train.py under deadpool-run, whose output is shown as it comes."""

    def __init__(self, args, home):
        self.args, self.home = args, home
        steps, digests = home / "steps", home / "digests"
        steps.mkdir(parents=True)
        digests.mkdir()
        launch = f"--nproc-per-node {args.ranks} --spares {args.spares}".split()
        script = f"--parallel {args.parallel} --steps {args.steps}".split()
        files = ("--print-every", str(args.steps // 8), "--step-log", steps, "--digest-dir", digests)
        say(f"$ deadpool-run {' '.join(launch)} train.py {' '.join(script)}")
        self.deadline = time.monotonic() + args.limit_s
        self.process = subprocess.Popen(  # noqa: S603 - our own launcher
            [*LAUNCHER, "--no-config", "--run-dir", home / "run", *launch, HERE / "train.py", *script, *files],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                try:
                    self.process.wait(10)
                except subprocess.TimeoutExpired:
                    continue
        self._reader.join(5)

    def _show(self):
        for line in self.process.stdout:
            if not line.startswith("digest "):
                say("  | " + line.rstrip())

    def completed(self, rank):
        """Return the number of steps that this rank has completed, and the pid of the process that did the last one."""
        log = self.home / "steps" / f"rank{rank}"
        lines = log.read_bytes().splitlines() if log.exists() else []
        if not lines:
            return 0, None
        step, _, pid = lines[-1].split()
        return int(step) + 1, int(pid)

    def owners(self):
        """Return the pid of each rank's process."""
        return [self.completed(rank)[1] for rank in range(self.args.ranks)]

    def reach(self, steps):
        """Wait until every rank has completed this many steps."""
        while any(self.completed(rank)[0] < steps for rank in range(self.args.ranks)):
            if self.process.poll() is not None:
                raise DemoError(f"the launcher ended with exit code {self.process.returncode} before step {steps}")
            self.check_time(f"step {steps} was reached")
            time.sleep(0.01)

    def finish(self):
        """Wait for the end; return each rank's digest."""
        while self.process.poll() is None:
            self.check_time("the end")
            time.sleep(0.02)
        self._reader.join(5)
        if self.process.returncode != 0:
            raise DemoError(f"the launcher ended with exit code {self.process.returncode}")
        return [(self.home / "digests" / f"rank{rank}").read_text().strip() for rank in range(self.args.ranks)]

    def check_time(self, what):
        if time.monotonic() > self.deadline:
            raise DemoError(f"{self.args.limit_s:.0f} s were over before {what}")


def say(line=""):
    print(line, flush=True)


def kill(training, rank):
    """Kill the rank's process with SIGKILL and show who holds each rank before and after."""
    before, reached = training.owners(), training.completed(rank)[0]
    command = ["kill-rank", str(rank), "--run-dir", str(training.home / "run"), "--yes"]
    say(f"$ deadpool-run {' '.join(command[:2])}    # SIGKILL, at about step {reached}")
    done = subprocess.run([*LAUNCHER, *command], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    if done.returncode != 0:
        raise DemoError(f"kill-rank failed: {done.stderr.strip() or done.stdout.strip()}")
    while (owner := training.completed(rank)[1]) == before[rank]:
        if training.process.poll() is not None:
            if training.completed(rank)[0] == training.args.steps:
                raise DemoError(f"rank {rank} had completed its steps before it was killed: give more --steps")
            raise DemoError(f"rank {rank} was never replaced (exit code {training.process.returncode})")
        training.check_time(f"rank {rank} was replaced")
        time.sleep(0.005)
    for other, (old, new) in enumerate(zip(before, training.owners(), strict=True)):
        if other == rank:
            say(f"  rank {other}: pid {old} killed, pid {owner} took its place")
        else:
            say(f"  rank {other}: pid {old} {'lives on' if old == new else f'became pid {new}'}")


def demonstrate(args, home):
    say(f"1. {args.ranks} ranks, without a kill")
    with Training(args, home / "unfailed") as training:
        expected = training.finish()
    say()
    say(f"2. the same, with {args.kills} kill{'s' * (args.kills != 1)} on the way")
    with Training(args, home / "killed") as training:
        for number in range(args.kills):
            # One kill: after a third of the steps. Two: after one and three fifths. The command takes a second or more.
            training.reach(args.steps * (2 * number + 1) // (2 * args.kills + 1))
            kill(training, args.rank if args.rank is not None else args.ranks - 1 - number % args.ranks)
        found = training.finish()
    say()
    say("3. SHA-256 of each rank's weights and optimizer state at the end")
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        say(f"  rank {rank}: unfailed {one[:16]}  killed {other[:16]}  {'equal' if one == other else 'DIFFERENT'}")
    return expected == found


def main():
    args = options()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deadpool-demo-") as home:
        try:
            same = demonstrate(args, Path(home))
        except DemoError as error:
            say(f"demo: {error}")
            return 1
    say()
    result = "the same, bit for bit" if same else "NOT the same"
    say(f"The weights are {result}. ({time.monotonic() - started:.0f} s)")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
