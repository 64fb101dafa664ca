"""Recipes as a user runs them: real launchers, real processes, and a bound on every wait."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
DEADPOOL = (sys.executable, "-m", "deadpool_run")
ORDERLY = Path(__file__).parent / "scripts" / "orderly.py"
"""Before a script or module that does not use the library: at its end torch may abort."""
BOUND_S = 90.0


@dataclass
class Running:
    """A launcher's process whose output goes to a file."""

    process: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert self.process.poll() is None, f"ended ({self.process.returncode}) before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"{BOUND_S} s passed before {what}:\n{self.text()}"
            time.sleep(0.005)

    def end(self) -> str:
        """Return all output of a run that ends well."""
        try:
            self.process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{BOUND_S} s passed before the end:\n{self.text()}")
        assert self.process.returncode == 0, self.text()
        return self.text()


def launched(tmp_path: Path, ranks: int, spares: int = 1) -> tuple[object, ...]:
    """Return the start of a deadpool-run command line; its run directory is tmp_path / "run"."""
    return (*DEADPOOL, "--no-config", "--run-dir", tmp_path / "run", "--nproc-per-node", ranks, "--spares", spares)


def kill_rank(tmp_path: Path, rank: int) -> None:
    """Kill a rank as a user does."""
    command = [*DEADPOOL, "kill-rank", str(rank), "--run-dir", str(tmp_path / "run"), "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
