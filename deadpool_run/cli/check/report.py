"""The result of a check as a table and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.text import Text

from deadpool_run.cli.check.compare import RunStates, StateDifference, in_words, split
from deadpool_run.cli.check.run import CheckRun
from deadpool_run.errors import RefusedError, ReplicasDifferError
from deadpool_run.text import counted, printable, shortened
from deadpool_run.view.text import table
from deadpool_run.wire.check import Fault

SCHEMA_VERSION = 1
_STYLES = {"exact": "green", "refused": "yellow", "different": "bold red", "stopped": "red", "not compared": "yellow"}


class CheckVerdict(StrEnum):
    """The result of one run."""

    EXACT = "exact"
    REFUSED = "refused"
    DIFFERENT = "different"
    STOPPED = "stopped"
    NOT_COMPARED = "not compared"
    """Of the run with torchrun, where the script may have no step loop."""


_OTHER_THAN_TORCHRUN = (
    "Without a fault, deadpool-run gives other weights than torchrun. It runs step 1 twice, and `job.rehearsing` is true in the "
    "first run: the steps change something that the second run does not find as it was (a file, a database, an object of a C "
    "library), or they depend on `job.rehearsing` or `job.protected`."
)
_STEPS_DIFFER = "seed every generator and call torch.use_deterministic_algorithms(True), then check again"
_SET_UP_DIFFERS = (
    "set-up gives other values in each run: seed every generator. If the script resumes from what an earlier run has saved, let it "
    'neither save nor resume in a check: `if "DEADPOOL_CHECK" not in os.environ`. Then check again'
)
_VERDICTS: Mapping[int | None, CheckVerdict] = {
    RefusedError.exit_code: CheckVerdict.REFUSED,
    ReplicasDifferError.exit_code: CheckVerdict.DIFFERENT,
}
"""By exit code."""


@dataclass(frozen=True, slots=True)
class Row:
    """A run with its result."""

    run: CheckRun
    verdict: CheckVerdict
    why: str = ""
    differences: Sequence[StateDifference] = ()
    met: bool = True
    """Whether the rank was killed in the planned phase; otherwise it was killed at the end of the step."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as an object for JSON."""
        return {
            "launcher": "torchrun" if self.run.with_torchrun else "deadpool-run",
            **{name: getattr(self.run.fault, name, None) for name in ("rank", "phase", "step")},
            "phase_met": self.met,
            "result": self.verdict.value,
            "why": self.why,
            "differences": [_to_json(each) for each in self.differences],
            "exit_code": self.run.exit_code,
            "seconds": round(self.run.seconds, 3),
            "output": str(self.run.output),
        }


@dataclass(slots=True)
class Report:
    """The results of a check so far."""

    steps: int
    ranks: int = 0
    rows: list[Row] = field(default_factory=list)
    irreproducible: Sequence[StateDifference] = ()
    """Differences of the two runs without a fault; with any, no fault is tried."""
    not_compared: Sequence[tuple[str, str]] = ()
    """Kinds and names of values, other than weights, that differ in every run."""

    @property
    def exact(self) -> bool:
        """Whether every run that was compared is exact."""
        fine = (CheckVerdict.EXACT, CheckVerdict.NOT_COMPARED)
        return not self.irreproducible and all(row.verdict in fine for row in self.rows)

    def to_json(self) -> str:
        """Return one JSON object."""
        unfailed = [row for row in self.rows if row.run.fault is None]
        parts = {
            "schema_version": SCHEMA_VERSION,
            "exact": self.exact,
            "steps": self.steps,
            "ranks": self.ranks,
            "reproducible": not self.irreproducible if len(unfailed) > 1 else None,
            "irreproducible": [_to_json(each) for each in self.irreproducible],
            "not_compared": [{"kind": kind, "name": name} for kind, name in self.not_compared],
            "runs": [row.to_json() for row in self.rows],
        }
        return json.dumps(parts)

    def show(self, console: Console) -> None:
        """Print the table, then a sentence for each row that is not exact."""
        shown = table(("rank", "phase", "step", "result", "s"), {"phase", "result"})
        for row in self.rows:
            fault = row.run.fault
            place = (
                ("-", _described(row.run), "-")
                if fault is None
                else (str(fault.rank), fault.phase.value, str(fault.step))
            )
            if not row.met:
                place = (place[0], f"between (no {place[1]})", place[2])
            shown.add_row(*place, Text(row.verdict, style=_STYLES[row.verdict]), f"{row.run.seconds:.1f}")
        console.print(shown)
        for row in self.rows:
            if details := [*row.why.splitlines(), *([in_words(row.differences)] if row.differences else [])]:
                text = "\n  ".join(map(printable, details))
                console.print(Text(f"{_described(row.run)}: {row.verdict}: {text}"), soft_wrap=True)
        console.print(Text(self.conclusion()), soft_wrap=True)

    def conclusion(self) -> str:
        """Return the result in a sentence."""
        if self.irreproducible:
            why = _SET_UP_DIFFERS if self.irreproducible[0].version == 0 else _STEPS_DIFFER
            return f"two runs without a fault differ {printable(in_words(self.irreproducible))}\n{why}"
        faults = [row for row in self.rows if row.run.fault is not None]
        exact = sum(row.verdict is CheckVerdict.EXACT for row in faults)
        if not faults:
            wrong = [row for row in self.rows if row.verdict is not CheckVerdict.EXACT] or self.rows
            return f"no rank was killed: the run without a fault was {wrong[-1].verdict}" if wrong else ""
        return f"{exact} of {len(faults)} exact, over {counted(self.steps, 'step')} and {counted(self.ranks, 'rank')}"


def described(fault: Fault) -> str:
    """Return a fault in words."""
    return f"rank {fault.rank}, {fault.phase}, step {fault.step}"


def _described(run: CheckRun) -> str:
    """Return the fault of a run in words."""
    if run.fault is not None:
        return described(run.fault)
    return "no fault (torchrun)" if run.with_torchrun else "no fault"


def judge(run: CheckRun, states: RunStates, reference: RunStates, report: Report) -> Row:
    """Return the result of a run with a fault, compared with the run without."""
    met = run.fault_happened()
    found = states.differences(reference, report.not_compared)
    missing = states.missing(report.ranks, report.steps)
    verdict, why = CheckVerdict.EXACT, ""
    if run.exit_code != 0:
        verdict, why = _VERDICTS.get(run.exit_code, CheckVerdict.STOPPED), run.reason
        own = None if found or verdict is not CheckVerdict.DIFFERENT else reference.diverging()
        if own is not None and own[0] <= states.last + 1:  # it stops before it writes the version that it compared
            verdict, why = CheckVerdict.STOPPED, f"{run.reason}\n{_own_words(*own)}"
    elif found:
        verdict = CheckVerdict.DIFFERENT
    elif met is None:
        verdict, why = CheckVerdict.STOPPED, "the rank did not reach the step of the fault"
    elif missing:
        verdict, why = CheckVerdict.STOPPED, f"rank {', '.join(map(str, missing))} ended before step {report.steps}"
    return Row(run, verdict, why, found, met=met is not False)


def _own_words(version: int, names: Sequence[str]) -> str:
    return (
        f"The script does this by itself: without a fault, {shortened(names)} differ between ranks from step {version} on, and what "
        "this run wrote before it stopped is exact. If the ranks are to have the same weights, let them compute the same: a "
        "learning rate, say, from the mean of all ranks' losses."
    )


def judge_unfailed(run: CheckRun, states: RunStates) -> Row:
    """Return the result of a run without a fault."""
    if run.exit_code != 0:
        return Row(run, _VERDICTS.get(run.exit_code, CheckVerdict.STOPPED), run.reason)
    if not states:
        why = "the script has no loop over job.steps() or job.batches(), so a loss cannot be repaired"
        return Row(run, CheckVerdict.REFUSED, why)
    return Row(run, CheckVerdict.EXACT)


def judge_torchrun(run: CheckRun, states: RunStates, reference: RunStates, report: Report) -> Row:
    """Return the result of the run with torchrun, compared with the run under deadpool-run without a fault."""
    if run.exit_code != 0:
        return Row(run, CheckVerdict.NOT_COMPARED, f"the script failed: {run.reason}")
    if not states:
        why = "without deadpool-run, the script has no loop over job.steps() or job.batches()"
        return Row(run, CheckVerdict.NOT_COMPARED, why)
    real, _ = split(states.differences(reference))
    if real:
        return Row(run, CheckVerdict.DIFFERENT, _OTHER_THAN_TORCHRUN, real)
    if missing := states.missing(report.ranks, report.steps):
        why = f"rank {', '.join(map(str, missing))} ended before step {report.steps}, and not under deadpool-run"
        return Row(run, CheckVerdict.DIFFERENT, why)
    return Row(run, CheckVerdict.EXACT)


def _to_json(each: StateDifference) -> dict[str, Any]:
    return {"name": each.name, "kind": each.kind, "rank": each.rank, "from_step": each.version}
