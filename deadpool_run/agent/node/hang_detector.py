"""Detection of hung ranks on the status page, a few times per timeout. Workers are never asked and never interrupted."""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from deadpool_run.core.events import Event, WorkerHung
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import Rank, WorkerId
from deadpool_run.vault.status_page import Phase, StatusPage

LOOKS = 4
"""Looks per timeout. Looks are counted, not timed: while this process is suspended, the workers are too."""
_IN_LOOP = frozenset({Phase.STEP, Phase.OPTIMIZER, Phase.BETWEEN, Phase.RESTORING, Phase.FINISHED, Phase.HELD})
"""RESTORING is among them: a rank is restored between the two runs of its trial."""
_WATCHED = (JobPhase.SETTING_UP, JobPhase.RUNNING, JobPhase.FINISHING)
_MAX_DESCRIBED = 8
"""The most ranks that a reason describes."""


@dataclass(frozen=True, slots=True)
class RankSight:
    """One look at one rank. If the next one is equal, the rank made no progress."""

    rank: Rank
    worker: WorkerId
    epoch: int
    phase: Phase
    completed: int
    """Steps."""
    issued: int
    """Collectives, in this epoch."""
    waited: int
    """The completed ones among them."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: in a collective, at a step's end on order, or for their end."""
        return self.phase in (Phase.FINISHED, Phase.HELD) or self.issued > self.waited

    @property
    def reached(self) -> tuple[bool, int, int]:
        """Its progress. Others wait for the rank with the least progress."""
        return self.phase is Phase.FINISHED, self.completed, self.issued


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """The culprits of a hang, none if all ranks look alike, and what was seen."""

    culprits: tuple[RankSight, ...]
    reason: str


def judge(sights: Sequence[RankSight], stopped: Collection[Rank], timeout_s: float) -> HangVerdict:
    """Return the ranks that hold up the others. The processes of `stopped` ranks are stopped by a signal."""
    culprits = _culprits(sights, stopped)
    others = [sight for sight in sights if sight not in culprits]
    seen = [_describe(sight, stopped) for sight in (*culprits, *others)]
    more = f"; and {len(seen) - _MAX_DESCRIBED} more" if len(seen) > _MAX_DESCRIBED else ""
    return HangVerdict(
        culprits, f"no rank has made progress for {timeout_s:g} s: {'; '.join(seen[:_MAX_DESCRIBED])}{more}"
    )


def _culprits(sights: Sequence[RankSight], stopped: Collection[Rank]) -> tuple[RankSight, ...]:
    halted = tuple(sight for sight in sights if sight.rank in stopped)
    if halted:
        return halted
    idle = tuple(sight for sight in sights if not sight.waits)
    if 0 < len(idle) < len(sights):
        return idle
    # All wait, as when one rank issued a collective early and hangs before it asks for the result. Or none waits, as with
    # NCCL, where the host never waits. Then the rank with the least progress is the culprit. If all are equal, none is.
    least = min(sight.reached for sight in sights)
    behind = tuple(sight for sight in sights if sight.reached == least)
    return behind if len(behind) < len(sights) else ()


def _describe(sight: RankSight, stopped: Collection[Rank]) -> str:
    if sight.rank in stopped:
        does = "is stopped by a signal"
    elif sight.phase is Phase.FINISHED:
        does = "has finished"
    else:
        does = "waits in a collective" if sight.waits else "waits for no collective"
    where = f"{sight.completed} steps completed, phase {sight.phase.name.lower()}"
    return f"rank {sight.rank} {does} ({where}, {sight.issued} collectives issued, {sight.waited} completed)"


def sights_of(state: State, status_page: StatusPage) -> tuple[RankSight, ...]:
    """Return a look at every rank; empty unless all are in their loop, where the status page shows progress."""
    if state.phase not in _WATCHED:
        return ()
    sights = []
    for seat in state.seats:
        if seat.owner is None:
            continue  # its script has ended
        at = status_page.rank_entries[seat.rank]
        if at.phase not in _IN_LOOP:
            return ()
        phase = Phase(at.phase)
        sights.append(RankSight(seat.rank, seat.owner, at.epoch, phase, at.completed, at.issued, at.waited))
    return tuple(sights)


def slowed_workers(state: State, now: float) -> dict[WorkerId, float]:
    """Return the workers that a user's fault slows now, and how many times."""
    return {owner.worker: factor for owner in state.owners() if (factor := owner.slowness(now)) > 1}


def is_stopped(pid: int) -> bool:
    """Return whether a signal stopped the process (state T of proc_pid_stat(5)); a debugger's stop is another state."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


@dataclass(eq=False, slots=True)
class HangDetector:
    """Looks at the ranks a few times per timeout, and submits `WorkerHung` for the culprits. Starts in the running loop.

    While the job is not `protected`, only stopped processes are culprits: the first steps may compile for long, and a rank
    may do anything after its last step.
    """

    timeout_s: float
    """0: it never looks."""
    look: Callable[[], tuple[RankSight, ...]]
    """Returns the present sights."""
    pid: Callable[[WorkerId], int | None]
    """Returns the process of a living worker."""
    submit: Callable[[Event], None]
    print_line: Callable[[str], None]
    """Prints a hang without a culprit."""
    protected: Callable[[], bool] = lambda: True
    slowed: Callable[[], Mapping[WorkerId, float]] = dict
    """Returns how many times slower than usual workers are on purpose. Everything may take as many times longer."""
    _slowed: Mapping[WorkerId, float] = field(default_factory=dict)
    _sights: tuple[RankSight, ...] = ()
    _times: int = 0
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        """Start, if there is a timeout."""
        if self.timeout_s > 0:
            self._set_timer()

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.timeout_s / LOOKS, self._look_again)

    def stillness(self, sights: tuple[RankSight, ...]) -> int:
        """Take a look's sights; return how many looks before it in a row saw the same."""
        self._times = self._times + 1 if sights and sights == self._sights else 0
        self._sights = sights
        return self._times

    def _look_again(self) -> None:
        self._set_timer()
        sights = self.look()
        before, self._slowed = self._slowed, self.slowed()
        if before != self._slowed:
            self._sights = ()
        times = self.stillness(sights)
        looks = math.ceil(LOOKS * max(self._slowed.values(), default=1.0))
        if times == 0 or times % looks != 0:
            return
        pids = {sight.rank: self.pid(sight.worker) for sight in sights}
        stopped = {rank for rank, pid in pids.items() if pid is not None and is_stopped(pid)}
        stopped -= {sight.rank for sight in sights if sight.worker in self._slowed}
        if not (stopped or self.protected()):
            return
        verdict = judge(sights, stopped, self.timeout_s * looks / LOOKS)
        if verdict.culprits:
            self._sights = ()
        elif times == looks:
            self.print_line(
                f"the job hangs, but no rank can be blamed, and none is ended: {verdict.reason}\n"
                "  Perhaps they wait in different collectives: `deadpool-run stack` shows where each is."
            )
        for culprit in verdict.culprits:
            self.submit(WorkerHung(culprit.worker, verdict.reason))
