"""One run of `deadpool-run check`: the launcher as a child process with a time limit."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_run.agent.records.run_record import RECORD_NAME
from deadpool_run.wire import typed
from deadpool_run.wire.check import FAULT_FILE, LOOP_FILE, VARIABLE, CheckPlan, Fault

OUTPUT = "output.log"
_STATES = "states"
_RUN_DIR = "run"
_END_S = 60.0
"""From SIGTERM to SIGKILL of a launcher; its own timeout for workers is shorter."""
_OURS = ("--standalone", "--no-slurm", "--run-id=", "--log-dir=", "--durable=", "--resume=auto", "--color=never")
"""Override files and environment: a check uses one machine and writes no checkpoint."""
_NOT_FOR_RUNS = frozenset({"DEADPOOL_DRY_RUN", "DEADPOOL_WORKER", "DEADPOOL_RUN_DIR"})


@dataclass(frozen=True, slots=True)
class CheckRun:
    """A finished run."""

    folder: Path
    fault: Fault | None
    exit_code: int | None
    """None: stopped at the time limit."""
    reason: str
    seconds: float

    @property
    def states(self) -> Path:
        """The folder that its workers wrote to."""
        return self.folder / _STATES

    @property
    def output(self) -> Path:
        """The file with the output of the launcher and the script."""
        return self.folder / OUTPUT

    def fault_happened(self) -> bool | None:
        """Return whether the fault happened in its phase; None if it did not happen at all."""
        text = _text(self.states / FAULT_FILE)
        return bool(json.loads(text)["met"]) if text else None

    def steps(self) -> int | None:
        """Return the number of steps of the loop; None if there was no loop."""
        text = _text(self.states / LOOP_FILE)
        return int(json.loads(text)["steps"]) if text else None

    def ranks(self) -> int:
        """Return the number of ranks."""
        return int(_record(self.folder / _RUN_DIR).get("world_size", 0))


class CheckRunner:
    """Runs the same job repeatedly."""

    def __init__(self, *, options: Sequence[str], target: Sequence[str], steps: int, timeout_s: float) -> None:
        """`options`: of the launcher; `target`: the script and its arguments; `timeout_s`: of one run."""
        self._line = [*options, *_OURS]
        self._target = list(target)
        self._steps = steps
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.stopping = False
        """Whether a signal stopped the check."""

    def stop(self, number: int, _frame: object) -> None:
        """Pass a signal on to the launcher. For `signal.signal`."""
        self.stopping = True
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, folder: Path, fault: Fault | None, environment: Mapping[str, str]) -> CheckRun:
        """Run the job to its end in this folder, which must not exist."""
        (folder / _STATES).mkdir(parents=True)
        plan = CheckPlan(self._steps, str((folder / _STATES).absolute()), fault)
        env = {name: value for name, value in environment.items() if name not in _NOT_FOR_RUNS}
        # Without a fixed seed, each interpreter orders sets of strings differently.
        env = {"PYTHONHASHSEED": "0", **env, VARIABLE: typed.to_json(plan).decode()}
        launcher = [sys.executable, "-P", "-m", "deadpool_run", "run", *self._line]
        launcher += ["--run-dir", str(folder / _RUN_DIR), "--", *self._target]
        began = time.monotonic()
        with (folder / OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our launcher with the user's script
                launcher, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env
            )
            code = self._wait(self._process)
            self._process = None
        seconds = time.monotonic() - began
        reason = str(_record(folder / _RUN_DIR).get("reason") or "")
        if code is None:
            reason = f"it did not end within {self._timeout_s:g} s (--timeout)"
        elif code and not reason:
            reason = last_line(folder / OUTPUT) or f"the launcher exited with code {code}"
        return CheckRun(folder, fault, code, reason, seconds)

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Return its exit code; None at the time limit. The process has ended when this returns or raises."""
        try:
            return process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its workers end with it
        process.wait()


def last_line(path: Path) -> str:
    """Return the last line that is not empty."""
    lines = _text(path).splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _record(run_dir: Path) -> dict[str, Any]:
    text = _text(run_dir / RECORD_NAME)
    record: dict[str, Any] = json.loads(text) if text else {}
    return record


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
