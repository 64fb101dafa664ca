"""The runs of `deadpool-run check`: without a fault, then one for each fault."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from deadpool_run.agent.console import tell
from deadpool_run.cli.check.compare import RunStates, split
from deadpool_run.cli.check.plan import plan_faults
from deadpool_run.cli.check.report import CheckVerdict, Report, Row, judge, judge_unfailed
from deadpool_run.cli.check.run import CheckRun, CheckRunner
from deadpool_run.errors import UsageError
from deadpool_run.wire.check import Fault

NOT_EXACT = 1
_LINES = 20
"""Lines of a failed run's output to print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What the user asked for."""

    options: Sequence[str]
    """Of the launcher, as on its command line."""
    target: Sequence[str]
    steps: int
    faults: str
    """See `plan.plan_faults`."""
    seed: int
    timeout_s: float
    """Of one run."""
    log_dir: Path | None


def check_script(request: CheckRequest, *, as_json: bool) -> int:
    """Check a script and write the result to stdout; return the exit code. Raises `UsageError`."""
    with _Folder(request.log_dir) as folder:
        report = _check(request, folder.path)
        folder.keep |= not report.exact
        _write(report, as_json=as_json)
    return 0 if report.exact else NOT_EXACT


class _Folder(AbstractContextManager["_Folder"]):
    """The folder of a check: the user's, or a temporary one that is removed if every run is exact."""

    def __init__(self, given: Path | None) -> None:
        self.keep = given is not None
        if given is None:
            self.path = Path(tempfile.mkdtemp(prefix="deadpool-check-"))
            return
        self.path = given.absolute()
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(f"--log-dir {given}: not an empty folder\nname a folder that does not exist yet")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove a temporary folder unless it must be kept, and print the path of a folder that stays."""
        if self.keep or kind is not None:
            tell(f"the output of each run is in {self.path}")
        else:
            shutil.rmtree(self.path)


def _check(request: CheckRequest, folder: Path) -> Report:
    """Run the script without a fault, then with each fault."""
    runner = CheckRunner(
        options=request.options, target=request.target, steps=request.steps, timeout_s=request.timeout_s
    )
    before = signal.signal(signal.SIGTERM, runner.stop)
    try:
        report = Report(request.steps)
        reference = _unfailed(runner, folder, report)
        if reference is not None:
            planned = plan_faults(report.ranks, report.steps, request.faults, request.seed)
            for number, fault in enumerate(planned, 1):
                said = (
                    f"fault {number} of {len(planned)}: SIGKILL to rank {fault.rank}, {fault.phase}, step {fault.step}"
                )
                run = _run(runner, folder / f"fault-{number:02d}", fault, said)
                report.rows.append(judge(run, RunStates(run.states), reference, report))
        return report
    finally:
        signal.signal(signal.SIGTERM, before)


def _unfailed(runner: CheckRunner, folder: Path, report: Report) -> RunStates | None:
    """Run the script twice without a fault; return its states, or None if nothing can be compared with them."""
    reference: RunStates | None = None
    for number in (1, 2):
        run = _run(runner, folder / f"unfailed-{number}", None, f"run {number} of 2 without a fault")
        states = RunStates(run.states)
        row = judge_unfailed(run, states)
        report.rows.append(row)
        if row.verdict is not CheckVerdict.EXACT:
            if row.verdict is CheckVerdict.STOPPED:
                _show_end(row)
            return None
        if reference is None:
            reference = states
            report.ranks, report.steps = run.ranks(), run.steps() or report.steps
            if report.ranks and states.missing(report.ranks, report.steps):
                report.rows[-1] = Row(run, CheckVerdict.STOPPED, f"its loop ended before step {report.steps}")
                return None
        else:
            report.irreproducible, chance = split(states.differences(reference))
            report.not_compared = sorted(chance)
    return None if report.irreproducible else reference


def _run(runner: CheckRunner, folder: Path, fault: Fault | None, said: str) -> CheckRun:
    tell(said)
    run = runner.run(folder, fault, os.environ)
    if runner.stopping:
        raise typer.Abort
    return run


def _show_end(row: Row) -> None:
    """Print the end of the output of a run that failed without a fault."""
    text = row.run.output.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines()[-_LINES:]:
        sys.stderr.write(f"  | {line}\n")


def _write(report: Report, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
        return
    report.show(Console())
