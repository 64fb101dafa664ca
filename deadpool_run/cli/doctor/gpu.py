"""The measurements of `doctor --gpu`: on this machine's GPUs, the cost of a step, and a killed rank with the phases of its repair.

Each layout runs three times: with torchrun, with deadpool-run, and with deadpool-run and a killed rank. The weights of the
last two must be equal.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_run.agent.console import installed_version
from deadpool_run.cli.check.run import end_of
from deadpool_run.cli.doctor.findings import Finding, Grade, without_options
from deadpool_run.core.effects import PHASES
from deadpool_run.text import size

LAYOUTS = ("ddp", "fsdp2")
MOST_RANKS = 8
COLUMNS = (
    "GPUs",
    "torch",
    "library",
    "layout",
    "torchrun, ms a step",
    "ms a step",
    "repair, s",
    "phases, s",
    "memory of a GPU (torchrun's)",
    "weights",
)
_SAME_ORDER = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Settings of every run, unless the user has others: NCCL adds in the same order before and after a repair."""
_FATAL_STEP = 20
_LINES_SHOWN = 15
_DIGITS = 16
"""Of a digest: enough to tell two apart."""
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one layout."""

    finding: Finding
    row: str
    """Its row of the report's table; empty if the layout failed."""


def too_few(gpus: int) -> Finding | None:
    """Return what a machine with so few GPUs cannot show; None for two or more."""
    where = "(device nodes /dev/nvidia*, CUDA_VISIBLE_DEVICES)"
    if gpus == 0:
        return Finding(Grade.NOTE, "gpu", f"no GPU is visible {where}: nothing was measured on GPUs")
    if gpus == 1:
        alone = "one rank is measured, which has no peers, so a loss interrupts no communicator"
        return Finding(Grade.NOTE, "gpu", f"only one GPU is visible {where}: {alone}")
    return None


def measure(environment: Mapping[str, str], ranks: int, timeout_s: float) -> Iterator[Measured]:
    """Yield the result of each layout with this many ranks. A run may take up to `timeout_s`."""
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory(prefix="deadpool-doctor-", ignore_cleanup_errors=True) as folder:
            yield _Layout(environment, layout, ranks, timeout_s, Path(folder)).measure()


def report(rows: list[str], behaviours: Sequence[Finding]) -> str:
    """Return what to paste into a report: how many of the behaviours were seen, and the table."""
    seen = sum(found.grade is Grade.OK for found in behaviours)
    head = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    return "\n".join([f"behaviours seen: {seen} of {len(behaviours)}", "", *head, *rows]) + "\n"


class _FailedError(Exception):
    """A run did not end as it should; the text says how, with its last lines."""


@dataclass(frozen=True, slots=True)
class _Layout:
    environment: Mapping[str, str]
    layout: str
    ranks: int
    timeout_s: float
    home: Path

    def measure(self) -> Measured:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks))
        try:
            theirs = self._run("torchrun", torchrun, -1)
            unfailed = self._run("unfailed", self._ours("unfailed"), -1)
            killed = self._run("killed", self._ours("killed"), _FATAL_STEP)
            (incident,) = self._incidents()
        except (_FailedError, ValueError) as error:
            return Measured(Finding(Grade.BAD, self.layout, str(error)), "")
        digests = [[each["digest"] for each in results] for results in (killed, unfailed)]
        is_exact = digests[0] == digests[1]
        shown = [[digest[:_DIGITS] for digest in each] for each in digests]
        phases = {name: incident[f"{name}_s"] for name in PHASES if incident.get(f"{name}_s") is not None}
        seconds = max(phases.values())
        peak, their_peak = (max(each["peak_bytes"] for each in results) for results in (killed, theirs))
        step, base = unfailed[0]["step_ms"], theirs[0]["step_ms"]
        text = (
            f"{step:.1f} ms a step (torchrun {base:.1f}); a killed rank was replaced in {seconds:.2f} s; "
            f"{f'at most {size(peak)} of a GPU (torchrun {size(their_peak)}); ' if peak else ''}the weights are "
            f"{'exact' if is_exact else 'not those of the run without a failure: {} instead of {}'.format(*shown)}"
        )
        cells = (
            f"{self.ranks} x {unfailed[0]['device']}",
            installed_version("torch"),
            unfailed[0]["library"],
            self.layout,
            f"{base:.1f}",
            f"{step:.1f}",
            f"{seconds:.2f}",
            ", ".join(f"{name} {value:.2f}" for name, value in phases.items()),
            f"{size(peak)} ({size(their_peak)})",
            "exact" if is_exact else "differ",
        )
        return Measured(
            Finding(Grade.OK if is_exact else Grade.BAD, self.layout, text), f"| {' | '.join(map(str, cells))} |"
        )

    def _ours(self, name: str) -> tuple[str, ...]:
        job = ("--nproc-per-node", str(self.ranks), "--spares", "1", "--run-dir", str(self.home / name / "run"))
        options = ("--standalone", "--no-slurm", "--no-config", "--log-dir", os.devnull, *job)
        return (sys.executable, "-P", "-m", "deadpool_run", "run", *options)

    def _run(self, name: str, launcher: tuple[str, ...], fatal_step: int) -> list[dict[str, Any]]:
        """Return what each rank measured."""
        folder = self.home / name
        folder.mkdir()
        training = ("-m", "deadpool_run.worker.check.measured", self.layout, str(folder), str(fatal_step))
        env = _SAME_ORDER | without_options(self.environment)
        with (folder / "output").open("w+b") as output:
            process = subprocess.Popen(  # noqa: S603 - our own
                [*launcher, *training], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
            )
            code = end_of(process, self.timeout_s, _END_S)
        results = [folder / f"rank-{rank}.json" for rank in range(self.ranks)]
        if code or code is None or not all(path.exists() for path in results):
            lines = (folder / "output").read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
            how = f"did not end within {self.timeout_s:g} s" if code is None else f"ended with exit code {code}"
            raise _FailedError("\n    ".join([f"the run {name!r} {how}; its last lines:", *lines]))
        return [json.loads(path.read_text(encoding="utf-8")) for path in results]

    def _incidents(self) -> list[dict[str, Any]]:
        """Return the repairs in the journal of the run with a killed rank."""
        _leader, *lines = (self.home / "killed" / "run" / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        effects = [effect for line in lines for effect in json.loads(line)["effects"]]
        return [effect["incident"] for effect in effects if effect["type"] == "ReportIncident"]
