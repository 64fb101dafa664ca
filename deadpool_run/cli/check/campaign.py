"""The runs of `deadpool-run check`: without a fault, then one for each fault."""

import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from deadpool_run.agent.console import tell
from deadpool_run.cli.check.compare import RunStates, split
from deadpool_run.cli.check.plan import plan_faults
from deadpool_run.cli.check.report import CheckVerdict, Report, Row, described, judge, judge_torchrun, judge_unfailed
from deadpool_run.cli.check.run import CheckRun, CheckRunner
from deadpool_run.errors import UsageError
from deadpool_run.wire.check import Fault

_LINES = 20
"""Lines of a failed run's output to print."""


def check_script(runner: CheckRunner, faults: str, seed: int, log_dir: Path | None, *, as_json: bool) -> int:
    """Check a script and write the result to stdout; return 0 if every run is exact, else 1. Raises `UsageError`.

    faults: as `asked` of `plan_faults`. log_dir: folder for the output of each run; None: a temporary one.
    """
    folder = _folder(log_dir)
    keep = True
    try:
        report = _check(runner, folder, faults, seed)
        if as_json:
            sys.stdout.write(report.to_json() + "\n")
        else:
            report.show(Console())
        keep = log_dir is not None or not report.exact
    finally:
        if keep:
            tell(f"the output of each run is in {folder}")
        else:
            shutil.rmtree(folder)
    return 0 if report.exact else 1


def _folder(given: Path | None) -> Path:
    """Return the folder of a check: the user's, or a temporary one. Raises `UsageError`."""
    if given is None:
        return Path(tempfile.mkdtemp(prefix="deadpool-check-"))
    path = given.absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"--log-dir {given}: not an empty folder\nname a folder that does not exist yet")
    return path


def _check(runner: CheckRunner, folder: Path, faults: str, seed: int) -> Report:
    """Run the script without a fault, then with each fault."""
    before = signal.signal(signal.SIGTERM, runner.stop)
    try:
        report = Report(runner.steps)
        reference = _unfailed(runner, folder, report)
        if reference is not None:
            planned = plan_faults(report.ranks, report.steps, faults, seed)
            for number, fault in enumerate(planned, 1):
                what = f"fault {number} of {len(planned)}: SIGKILL to {described(fault)}"
                run = _run(runner, folder / f"fault-{number:02d}", fault, what)
                report.rows.append(judge(run, RunStates(run.states), reference, report))
        return report
    finally:
        signal.signal(signal.SIGTERM, before)


def _unfailed(runner: CheckRunner, folder: Path, report: Report) -> RunStates | None:
    """Run the script without a fault; return its states, or None if nothing can be compared with them.

    The second run, with torchrun, shows that the script is reproducible, and that deadpool-run alone changes nothing. If it
    differs or cannot be compared, a third one under deadpool-run tells why.
    """
    reference = _first(runner, folder / "unfailed-1", report)
    if reference is None:
        return None
    tell("a run without a fault, with torchrun")
    run = runner.run_with_torchrun(folder / "torchrun", report.ranks)
    _stop_if_told(runner)
    states = RunStates(run.states)
    with_torchrun = judge_torchrun(run, states, reference, report)
    if with_torchrun.verdict is CheckVerdict.EXACT and not states.differences(reference):
        report.rows.append(with_torchrun)
        return reference
    again = _run(runner, folder / "unfailed-2", None, "a second run without a fault")
    states = RunStates(again.states)
    row = judge_unfailed(again, states)
    if row.verdict is CheckVerdict.EXACT:
        report.irreproducible, chance = split(states.differences(reference))
        report.not_compared = sorted(chance)
        if report.irreproducible:
            row = replace(row, verdict=CheckVerdict.DIFFERENT)
    else:
        _print_end(row)
    report.rows += [row] if report.irreproducible or row.verdict is not CheckVerdict.EXACT else [with_torchrun, row]
    return reference if report.exact else None


def _first(runner: CheckRunner, folder: Path, report: Report) -> RunStates | None:
    """Run the script once without a fault; return its states, or None if the check is over."""
    run = _run(runner, folder, None, "a run without a fault")
    states = RunStates(run.states)
    row = judge_unfailed(run, states)
    report.rows.append(row)
    if row.verdict is not CheckVerdict.EXACT:
        _print_end(row)
        return None
    report.ranks, report.steps = run.ranks(), run.steps() or report.steps
    if states.missing(report.ranks, report.steps):
        report.rows[-1] = Row(run, CheckVerdict.STOPPED, f"its loop ended before step {report.steps}")
        return None
    return states


def _print_end(row: Row) -> None:
    """Print the last lines of a run that failed."""
    if row.verdict is CheckVerdict.STOPPED:
        text = row.run.output.read_text(encoding="utf-8", errors="replace")
        sys.stderr.writelines(f"  | {line}\n" for line in text.splitlines()[-_LINES:])


def _run(runner: CheckRunner, folder: Path, fault: Fault | None, what: str) -> CheckRun:
    tell(what)
    run = runner.run(folder, fault)
    _stop_if_told(runner)
    return run


def _stop_if_told(runner: CheckRunner) -> None:
    if runner.stopping:
        raise typer.Abort
