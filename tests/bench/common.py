"""Common parts of benchmarks: they start a run of recipes/gpt, watch its steps from outside, and print results.

For each completed step of a rank, the script appends one line (step, CLOCK_MONOTONIC nanoseconds, pid) with a single
`write`. All times are computed from these lines, so both launchers are measured in the same way.
"""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from deadpool_run.coordinator.address import control_address

ROOT = Path(__file__).resolve().parents[2]
GPT = ROOT / "recipes" / "gpt" / "train.py"
BASELINE = Path(__file__).resolve().parent / "baseline_train.py"
POLL_S = 0.002


class BenchError(Exception):
    """A run cannot be measured."""


@dataclass(frozen=True)
class Stamp:
    """One completed step of one rank."""

    step: int
    ns: int
    pid: int


class StepLog:
    """The completed steps of one rank, read from its growing log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamps: list[Stamp] = []
        self._offset = 0

    def read(self) -> list[Stamp]:
        """Return all stamps so far. An incomplete last line is read at the next call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.stamps
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.stamps += [Stamp(*map(int, line.split())) for line in whole.splitlines()]
        return self.stamps


def _user_environment() -> dict[str, str]:
    """Return the environment without a build machine's settings, which make Python compile the launchers at each start."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass
class Run:
    """One run of a script under a launcher. As a context manager, it ends all processes."""

    home: Path
    ranks: int
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    started_ns: int = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)
    logs: list[StepLog] = field(init=False)

    def __enter__(self) -> Self:
        for folder in ("steps", "digests"):
            (self.home / folder).mkdir(parents=True)
        self.logs = [StepLog(self.home / "steps" / f"rank{rank}") for rank in range(self.ranks)]
        with (self.home / "output").open("wb") as output:
            self.started_ns = time.monotonic_ns()
            self.process = subprocess.Popen(
                self.command, env={**_user_environment(), **self.env}, stdout=output, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(self, *_: object) -> None:
        for number, bound_s in ((signal.SIGTERM, 40), (signal.SIGKILL, 10)):
            if self.process.poll() is not None:
                return
            self.process.send_signal(number)
            try:
                self.process.wait(bound_s)
            except subprocess.TimeoutExpired:
                continue

    def output(self, lines: int = 30) -> str:
        """Return the last lines of the output of the launcher and its workers."""
        return "\n".join((self.home / "output").read_text(errors="replace").splitlines()[-lines:])

    def wait(self, what: str, condition: Callable[[], Any], bound_s: float, poll_s: float = POLL_S) -> Any:
        """Wait for a true value of the condition, and return it. Raises BenchError after `bound_s`, or if the run ends."""
        deadline = time.monotonic() + bound_s
        while not (value := condition()):
            if self.process.poll() is not None:
                raise BenchError(
                    f"the run ended with {self.process.returncode} before {what}; its last lines:\n{self.output()}"
                )
            if time.monotonic() > deadline:
                raise BenchError(f"{bound_s:.0f} s passed before {what}; the run's last lines:\n{self.output()}")
            time.sleep(poll_s)
        return value

    def end(self, bound_s: float) -> None:
        """Wait for the end of the run. Raises BenchError unless it ends in time with exit code 0."""
        try:
            code = self.process.wait(bound_s)
        except subprocess.TimeoutExpired:
            raise BenchError(f"{bound_s:.0f} s passed before the end; the last lines:\n{self.output()}") from None
        if code != 0:
            raise BenchError(f"the run ended with {code}; its last lines:\n{self.output()}")

    def completed(self) -> int:
        """Return the number of steps that every rank has completed."""
        return min((log.read()[-1].step + 1 if log.read() else 0) for log in self.logs)

    def pid(self, rank: int) -> int:
        """Return the pid of the process that completed the rank's last step."""
        return self.logs[rank].read()[-1].pid

    def digests(self) -> list[str]:
        """Return the final digest of each rank."""
        return [(self.home / "digests" / f"rank{rank}").read_text().strip() for rank in range(self.ranks)]

    def startup_s(self) -> float:
        """Return the time from the launcher's start to the first completed step of all ranks."""
        return (max(log.read()[0].ns for log in self.logs) - self.started_ns) / 1e9

    @property
    def run_dir(self) -> Path:
        """The folder of deadpool-run's control socket."""
        return self.home / "run"

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the launcher's control socket, and return the answer. Raises BenchError if it is refused."""
        with socket.socket(socket.AF_UNIX) as control, control.makefile("rw") as stream:
            control.settimeout(10)
            with control_address(self.run_dir) as address:
                control.connect(address)
            stream.write(json.dumps(request) + "\n")
            stream.flush()
            answer: dict[str, Any] = json.loads(stream.readline())
        if "error" in answer:
            raise BenchError(f"{request}: {answer['error']}")
        return answer

    def status(self) -> dict[str, Any]:
        """Return the launcher's status object."""
        return self.ask({"do": "status"})


def deadpool(home: Path, ranks: int, spares: int, *script: object, path: Path = GPT) -> Run:
    """Return a run of `path` under deadpool-run."""
    command = [
        sys.executable,
        "-m",
        "deadpool_run",
        "--no-config",
        "--run-dir",
        home / "run",
        "--nproc-per-node",
        ranks,
    ]
    return Run(home, ranks, [*map(str, command), "--spares", str(spares), *_script(path, home, script)])


def torchrun(home: Path, ranks: int, *script: object, path: Path = GPT, max_restarts: int = 0) -> Run:
    """Return a run of `path` under torchrun.

    Without the variable, torchrun of torch 2.13 cannot recover on one machine: the store that it shares with the workers
    keeps the addresses of dead ranks.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command += ["--max-restarts", max_restarts]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Run(home, ranks, [*map(str, command), *_script(path, home, script)], env)


def _script(path: Path, home: Path, script: Sequence[object]) -> list[str]:
    logs = ["--step-log", home / "steps", "--digest-dir", home / "digests"]
    return [str(part) for part in (path, *script, *logs)]


@dataclass(frozen=True)
class Recovery:
    """One kill and its recovery. Times are in seconds."""

    rank: int
    total_s: float
    step: int
    steps_repeated: int
    """The number of steps that a rank completed twice."""
    survivors_kept: bool
    """Whether all other ranks have kept their processes."""


def kill_and_time(run: Run, rank: int, bound_s: float) -> Recovery:
    """Kill the rank's process, and measure the time until every rank has completed the same step again.

    It is the first step of the rank's new process. Survivors cannot complete it without this process.
    """
    before = [run.pid(other) for other in range(run.ranks)]
    killed_ns = time.monotonic_ns()
    os.kill(before[rank], signal.SIGKILL)
    run.wait(f"rank {rank} was replaced", lambda: run.logs[rank].read()[-1].pid != before[rank], bound_s)
    first = next(stamp for stamp in run.logs[rank].stamps if stamp.ns > killed_ns and stamp.pid != before[rank])
    run.wait(f"all ranks had completed step {first.step}", lambda: run.completed() > first.step, bound_s)
    last = [_last(log, first.step) for log in run.logs]
    repeated = max(
        sum(stamp.step >= first.step and stamp.ns < end for stamp in log.stamps)
        for log, end in zip(run.logs, last, strict=True)
    )
    kept = all(run.pid(other) == before[other] for other in range(run.ranks) if other != rank)
    return Recovery(rank, (max(last) - killed_ns) / 1e9, first.step, repeated, kept)


def _last(log: StepLog, step: int) -> int:
    return next(stamp.ns for stamp in reversed(log.read()) if stamp.step == step)


def machine() -> dict[str, Any]:
    """Return the properties of the machine that times depend on."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "deadpool_run": version("deadpool-run"),
    }


def header(title: str, parameters: dict[str, Any]) -> None:
    """Print the title, the machine and the parameters."""
    print(f"# {title}")
    print("machine:    " + ", ".join(f"{name} {value}" for name, value in machine().items()))
    print("parameters: " + ", ".join(f"{name} {value}" for name, value in parameters.items()), flush=True)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile: the smallest value that is not less than this share of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows as a table. The first row is the heading, the first column is text."""
    rank_entries = [[str(rank_entry) for rank_entry in row] for row in rows]
    widths = [max(len(row[column]) for row in rank_entries) for column in range(len(rank_entries[0]))]
    for number, row in enumerate(rank_entries):
        rest = [rank_entry.rjust(width) for rank_entry, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *rest]))
        if number == 0:
            print("  ".join("-" * width for width in widths))
    sys.stdout.flush()


def result(name: str, values: dict[str, Any]) -> None:
    """Print the last line of a benchmark, which is machine-readable."""
    print(json.dumps({"benchmark": name, "machine": machine(), **values}), flush=True)
