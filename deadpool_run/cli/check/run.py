"""One run of `deadpool-run check`: the launcher, deadpool-run or torchrun, as a child process with a time limit."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deadpool_run.agent.environment import base_environment
from deadpool_run.agent.records.run_record import RECORD_NAME
from deadpool_run.wire import typed
from deadpool_run.wire.check import FAULT_FILE, LOOP_FILE, VARIABLE, CheckPlan, Fault
from deadpool_run.wire.typed import read_object

OUTPUT = "output.log"
_STATES = "states"
_RUN_DIR = "run"
_END_S = 60.0
"""From SIGTERM to SIGKILL of a launcher; its own timeout for workers is shorter."""
_OURS = (
    "--standalone",
    "--no-slurm",
    "--run-id=",
    "--log-dir=",
    "--durable=",
    "--resume=auto",
    "--color=never",
    "--verbose",
)
"""Override files and environment: a check uses one machine and writes no checkpoint."""
_ERROR = re.compile(r"(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception): .*)")
"""The last line of a traceback; torchrun prints lines of its own after it."""
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
    with_torchrun: bool = False
    """Whether torchrun launched it, so that no rank was protected."""

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
        return read_object(self.states / FAULT_FILE).get("met")

    def steps(self) -> int | None:
        """Return the number of steps of the loop; None if there was no loop."""
        return read_object(self.states / LOOP_FILE).get("steps")

    def ranks(self) -> int:
        """Return the number of ranks."""
        return int(read_object(self.folder / _RUN_DIR / RECORD_NAME).get("world_size", 0))


@dataclass(slots=True)
class CheckRunner:
    """Runs the same job repeatedly."""

    options: Sequence[str]
    """Of the launcher, as on its command line."""
    target: Sequence[str]
    """The script and its arguments."""
    steps: int
    timeout_s: float
    """Of one run."""
    is_module: bool = False
    """Whether the target is the name of a module (-m)."""
    stopping: bool = False
    """Whether a signal stopped the check."""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def stop(self, number: int, _frame: object) -> None:
        """Pass a signal on to the launcher. For `signal.signal`."""
        self.stopping = True
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, folder: Path, fault: Fault | None) -> CheckRun:
        """Run the job in this folder, which must not exist, until it ends."""
        launcher = [sys.executable, "-P", "-m", "deadpool_run", "run", *self.options, *_OURS]
        launcher += ["--run-dir", str(folder / _RUN_DIR), "--"]
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_RUNS}
        code, seconds = self._launch(folder, fault, launcher, env)
        reason = str(read_object(folder / _RUN_DIR / RECORD_NAME).get("reason") or "")
        return CheckRun(folder, fault, code, self._reason(folder, code, reason), seconds)

    def run_with_torchrun(self, folder: Path, ranks: int) -> CheckRun:
        """Run the script without protection, in this folder, which must not exist, until it ends."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher += ["-m"] if self.is_module else []
        code, seconds = self._launch(folder, None, launcher, base_environment(ranks, os.environ))
        return CheckRun(folder, None, code, self._reason(folder, code), seconds, with_torchrun=True)

    def _launch(
        self, folder: Path, fault: Fault | None, launcher: Sequence[str], env: Mapping[str, str]
    ) -> tuple[int | None, float]:
        """Return exit code and seconds of a run."""
        (folder / _STATES).mkdir(parents=True)
        plan = CheckPlan(self.steps, str((folder / _STATES).absolute()), fault)
        began = time.monotonic()
        with (folder / OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - a launcher with the user's script
                [*launcher, *self.target],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**env, VARIABLE: typed.to_json(plan).decode()},
            )
            code = end_of(self._process, self.timeout_s, _END_S)
            self._process = None
        return code, time.monotonic() - began

    def _reason(self, folder: Path, code: int | None, recorded: str = "") -> str:
        """Return why a run ended with this exit code; empty for 0 without a recorded reason."""
        if code is None:
            return f"it did not end within {self.timeout_s:g} s (--timeout)"
        if not code or recorded:
            return recorded
        text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [found[1] for line in lines if (found := _ERROR.fullmatch(line))]
        return errors[-1] if errors else lines[-1] if lines else f"the launcher exited with code {code}"


def end_of(process: subprocess.Popen[bytes], timeout_s: float, grace_s: float) -> int | None:
    """Return its exit code; None at the time limit, when it gets SIGTERM, and SIGKILL after `grace_s`. The process has ended when this returns or raises."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.terminate()  # unless it has ended
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()  # its workers end with it
            process.wait()
