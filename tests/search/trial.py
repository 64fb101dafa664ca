"""Runs one drawn job and judges it: exact, refused, stopped for a reason, or a failure."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draw import BREACHES, Job, Strike
from kit.account import States
from kit.cluster import Cluster

SCRIPT = Path(__file__).parent / "scripts" / "searched.py"
LIMIT_S = 480.0
"""The longest time for a job, on a machine with other work."""
REFUSALS = (94, 95)
STOPS = (
    r"the world was started again \d+ times; \d+ are allowed",
    r"after its last step",
)
"""Reasons for a job to stop although its script breaks no rule: too many faults in set-up, or a fault at the end."""
BLAME = "a bug in the script"


@dataclass
class Verdict:
    """The result of a job."""

    job: Job
    outcome: str
    """`exact`, `refused`, `stopped`, or the kind of failure."""
    words: str = ""
    happened: int = 0
    """The number of drawn faults that happened."""
    evidence: list[Cluster] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether the job did what it must not do."""
        return self.outcome not in ("exact", "refused", "stopped")


def run(job: Job, keep: Path) -> Verdict:
    """Run the job without and with its faults, and compare. The files of a failure are copied to `keep`."""
    home = Path(tempfile.mkdtemp(prefix="search"))
    (home / "job.json").write_text(job.to_json(), encoding="utf-8")
    try:
        verdict = _run(job, home)
    except Exception:  # noqa: BLE001 - the search goes on with the next seed
        verdict = Verdict(job, "the search broke", traceback.format_exc())
    if verdict.failed:
        shutil.rmtree(keep, ignore_errors=True)
        shutil.copytree(home, keep, ignore=_pipes)
        (keep / "verdict.txt").write_text(f"{verdict.outcome}\n{verdict.words}\n", encoding="utf-8")
    shutil.rmtree(home, ignore_errors=True)
    return verdict


def _pipes(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if not (Path(folder) / name).is_file() and not (Path(folder) / name).is_dir()}


def _run(job: Job, home: Path) -> Verdict:
    under_torchrun = job.under_torchrun and not job.breach
    unfailed, why = _life(job, home / "unfailed", struck=False, torchrun=under_torchrun)
    if why or unfailed.exit_code:
        return _judge_end(job, unfailed, why, "the unfailed run")
    reference = unfailed.account.states()
    failed, why = _life(job, home / "failed", struck=True)
    verdict = (
        _judge_end(job, failed, why, "the job") if why or failed.exit_code else _judge_states(job, failed, reference)
    )
    verdict.happened = len(failed.account.of("dying")) + len(getattr(failed, "struck", ()))
    return verdict


def _life(job: Job, home: Path, *, struck: bool, torchrun: bool = False) -> tuple[Cluster, str]:
    """Run the job to its end. Return it, and the defect of its end if there is one."""
    home.mkdir()
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks))
    args = ("--job", str(home.parent / "job.json"), "--flags", str(home / "flags"))
    cluster = Cluster(
        home,
        *args,
        *(() if struck else ("--unfailed",)),
        script=SCRIPT,
        nproc=job.ranks,
        spares=job.spares if struck else 0,
        options=job.options if struck else (),
        launcher=launcher if torchrun else (),
    )
    why = ""
    try:
        strikes = Strikes(cluster, job.strikes if struck else ())
        deadline = time.monotonic() + LIMIT_S
        while not cluster.poll(min(strikes.due_in(), deadline - time.monotonic())) and time.monotonic() < deadline:
            strikes.strike()
        cluster.struck = strikes.done
        if cluster.exit_code is None:
            why = f"hang: it did not end within {LIMIT_S:g} s\n{cluster.stacks()}"
        elif not torchrun:
            cluster.check_nothing_left()
    except AssertionError as error:
        why = f"leak: {error}"
    finally:
        (home / "told.txt").write_text(cluster.told(), encoding="utf-8")
        (home / "stderr.txt").write_text(cluster.stderr, encoding="utf-8")
        (home / "stdout.txt").write_text(cluster.stdout, encoding="utf-8")
        (home / "events.txt").write_text("\n".join(map(str, cluster.events)), encoding="utf-8")
        try:
            cluster.close()
        except AssertionError as error:
            why = why or f"leak: {error}"
    return cluster, why


class Strikes:
    """Sends the signals from outside, each at its time."""

    def __init__(self, cluster: Cluster, strikes: tuple[Strike, ...]) -> None:
        self.cluster = cluster
        self.waiting: list[tuple[Strike, float | None]] = [(strike, None) for strike in strikes]
        self.done: list[tuple[Strike, int]] = []

    def due_in(self) -> float:
        """Return the seconds to the next signal."""
        due = [at for _, at in self.waiting if at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else 1.0

    def strike(self) -> None:
        """Send the signals that are due, and note the times of those whose event has happened."""
        now, left = time.monotonic(), []
        for strike, due in self.waiting:
            at = now + strike.ms / 1000 if due is None and self._has_come(strike) else due
            if at is None or at > now:
                left.append((strike, at))
            elif pid := self._target(strike):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.Signals[strike.signal])
                    self.done.append((strike, pid))
        self.waiting = left

    def _has_come(self, strike: Strike) -> bool:
        account = self.cluster.account
        if strike.after_version < 0:
            return len(account.of("dying")) > strike.after_death
        return any(event["version"] >= strike.after_version for event in account.of("state"))

    def _target(self, strike: Strike) -> int | None:
        events, pids, holders = decisions(self.cluster), {}, {}
        for decision in events:
            event = decision.get("event", {})
            if event.get("type") == "WorkerStarted":
                pids[event["worker"]] = event["pid"]
            for effect in decision.get("effects", ()):
                if effect["type"] == "AssignRank":
                    holders[effect["rank"]] = effect["worker"]
        worker = max(pids, default=None) if strike.target == "newest" else holders.get(int(strike.target.split()[1]))
        return pids.get(worker)


def decisions(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the coordinator's decisions so far. An incomplete line of its journal is left out."""
    path = cluster.run_dir / "journal.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[1:] if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


# --- judging ---------------------------------------------------------------------------------------------------------


def _judge_end(job: Job, cluster: Cluster, why: str, which: str) -> Verdict:
    """Judge a job that did not end with exit code 0."""
    if why:
        return Verdict(job, f"{which}: {why.partition(':')[0]}", why)
    reasons = [effect["reason"] for effect in cluster.effects() if effect["type"] == "StopJob"]
    outcome = judge_stop(job.breach, cluster.exit_code, reasons, cluster.stderr)
    if outcome not in ("refused", "stopped"):
        outcome = f"{which} {outcome}"
    return Verdict(job, outcome, f"exit code {cluster.exit_code}: {'; '.join(reasons) or 'no reason'}")


def judge_stop(breach: str, code: int | None, reasons: list[str], text: str) -> str:
    """Return `refused`, `stopped`, or the defect of a stop with this output."""
    if not any(reason and reason.splitlines()[0] in text for reason in reasons):
        return "stopped without a printed reason"
    if code in REFUSALS or (breach and "ScriptError" in text):
        if not breach:
            return f"was refused ({code}), but the loop breaks no rule"
        return (
            "refused"
            if re.search(BREACHES[breach], text, re.IGNORECASE)
            else "was refused, but the text names no cause"
        )
    if any(re.search(stop, reason) for stop in STOPS for reason in reasons):
        return "stopped"
    if BLAME in text and breach != "swallows":
        return f"ended as {BLAME}"
    return "stopped for a reason that the draw does not explain"


def _judge_states(job: Job, cluster: Cluster, reference: States) -> Verdict:
    """Judge a job that ended with exit code 0."""
    account = cluster.account
    try:
        account.check_same_as(reference)
    except AssertionError as error:
        return Verdict(job, "silently different", str(error))
    if found := _unexplained(cluster):
        return Verdict(job, "a rank changed hands without a reason", found)
    most = _most_repeated(job, cluster)
    if (repeated := account.steps_repeated()) > most:
        return Verdict(job, "too many steps were repeated", f"{repeated}, but at most {most} are allowed")
    return Verdict(job, "exact")


def _unexplained(cluster: Cluster) -> str:
    """Return the first worker that lost its rank without being named in the output."""
    holders: dict[int, int] = {}
    for effect in cluster.effects():
        finishing = effect["type"] == "Announce" and effect["what"].startswith("finishing again")
        if effect["type"] == "BeginGeneration" or finishing:
            holders.clear()  # every rank changes hands, and one line announces it with the reason
        if effect["type"] == "AssignRank":
            before = holders.get(effect["rank"], effect["worker"])
            if before != effect["worker"] and f"worker {before})" not in cluster.stderr:
                return f"rank {effect['rank']} went from worker {before} to worker {effect['worker']}"
            holders[effect["rank"]] = effect["worker"]
    return ""


def _most_repeated(job: Job, cluster: Cluster) -> int:
    """Return the largest number of steps that a loss may repeat (docs/failures.md)."""
    asked = int(dict(zip(job.options[::2], job.options[1::2], strict=True)).get("--capture-interval", 1))
    rarer = [effect["interval"] for effect in cluster.effects() if effect["type"] == "SetCaptureInterval"]
    skipped = any(decision["event"]["type"] == "CaptureSkipped" for decision in cluster.journal())
    return 3 * max([asked, *rarer]) if rarer or skipped else asked
