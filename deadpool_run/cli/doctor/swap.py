"""A short run of two ranks and a spare in which rank 1 is killed. Its weights must equal those of a run without a failure."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from deadpool_run.cli.check.run import end_of
from deadpool_run.cli.doctor.findings import Finding, Grade, without_options

_SCRIPT = """
import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import deadpool_run

STEPS, FATAL_STEP = 20, 8


def train(model, optimizer, index):
    torch.manual_seed(index)
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    return loss


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    return model


here = Path(sys.argv[1])
job = deadpool_run.init()
model = DistributedDataParallel(make())
optimizer = torch.optim.Adam(model.parameters())
job.protect(model=model, optimizer=optimizer)
for step in job.steps(STEPS):
    with step:
        train(model, optimizer, step.index)
        if step.index == FATAL_STEP and job.rank == 1 and not (here / "killed").exists():
            (here / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()

# Both ranks have the same batches, so their mean gradient is that of one process.
alone = make()
optimizer = torch.optim.Adam(alone.parameters())
for index in range(STEPS):
    train(alone, optimizer, index)
    optimizer.step()
same = all(torch.equal(ours, theirs) for ours, theirs in zip(model.module.parameters(), alone.parameters()))
(here / f"rank-{job.rank}").write_text("exact" if same else "different")
"""
_RANKS = 2
_RECOVERED = re.compile(r"recovered rank 1 on (spare|fresh) worker .* in ([0-9.]+) s; .*, ([0-9]+ steps?) repeated")
_LINES_SHOWN = 15
_END_S = 30.0


def swap(environment: Mapping[str, str], timeout_s: float) -> Finding:
    """Run the job. Return whether a spare replaced the rank and the weights are exact."""
    with tempfile.TemporaryDirectory(prefix="deadpool-doctor-", ignore_cleanup_errors=True) as folder:
        here = Path(folder)
        (here / "swap.py").write_text(_SCRIPT)
        began = time.monotonic()
        code, output = _run(here, environment, timeout_s)
        seconds = time.monotonic() - began
        results = [(here / f"rank-{rank}") for rank in range(_RANKS)]
        weights = [path.read_text() for path in results if path.exists()]
    found = _RECOVERED.search(output)
    if code is None:
        return _failed(f"it did not end within {timeout_s:g} s", output)
    if code:
        return _failed(f"it ended with exit code {code}", output)
    if found is None:
        return _failed("the killed rank was not replaced", output)
    if weights != ["exact"] * _RANKS:
        return _failed("the weights are not those without a failure", output)
    text = f"a killed rank was replaced in {found[2]} s with {found[3]} repeated; the weights are exact ({seconds:.0f} s in all)"
    return Finding(Grade.OK, "swap", text)


def _run(here: Path, environment: Mapping[str, str], timeout_s: float) -> tuple[int | None, str]:
    """Return exit code and output of the run; None as the code at the time limit."""
    env = without_options(environment)
    job = ("--nproc-per-node", str(_RANKS), "--spares", "1", "--run-dir", str(here / "run"), "--log-dir", os.devnull)
    options = ("--standalone", "--no-slurm", "--no-config", *job)
    command = [sys.executable, "-P", "-m", "deadpool_run", "run", *options, str(here / "swap.py"), str(here)]
    with (here / "output").open("w+b") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)  # noqa: S603 - our own
        code = end_of(process, timeout_s, _END_S)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _failed(why: str, output: str) -> Finding:
    last = "\n".join(f"    {line}" for line in output.splitlines()[-_LINES_SHOWN:])
    return Finding(Grade.BAD, "swap", f"{why}; its last lines:\n{last}")
