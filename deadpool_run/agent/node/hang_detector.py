"""Finds ranks that make no progress. What was seen is judged by pure functions; `HangDetector` looks, and says who is to be ended.

The status page is looked at a few times per time-out, whatever the job does: workers are never asked and never interrupted.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from deadpool_run.core.events import Event, WorkerHung
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import Rank, WorkerId
from deadpool_run.vault.status_page import Phase, StatusPage

LOOKS = 4
"""Looks per time-out. Counted, not timed: while this process was suspended, so were the workers, and nobody hung."""
_IN_LOOP = frozenset({Phase.STEP, Phase.OPTIMIZER, Phase.BETWEEN, Phase.FINISHED})
_TOLD = 8
"""Ranks that a reason describes; those to blame come first."""


@dataclass(frozen=True, slots=True)
class RankSight:
    """What one look saw of one rank. Two equal ones mean that it made no progress between them."""

    rank: Rank
    worker: WorkerId
    epoch: int
    phase: Phase
    completed: int
    """Steps."""
    issued: int
    """Collectives, in this epoch."""
    waited: int
    """Those of them that have completed."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: in a collective, or for them to finish too."""
        return self.phase is Phase.FINISHED or self.issued > self.waited

    @property
    def reached(self) -> tuple[bool, int, int]:
        """How far it has got; the smallest is the one that the others wait for."""
        return self.phase is Phase.FINISHED, self.completed, self.issued


@dataclass(frozen=True, slots=True)
class Stillness:
    """How often the same was seen again in a row."""

    sights: tuple[RankSight, ...] = ()
    times: int = 0


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Who is to blame for a hang: nobody, if what was seen blames all alike. `reason` says what was seen."""

    culprits: tuple[RankSight, ...]
    reason: str


def looked(before: Stillness, sights: tuple[RankSight, ...]) -> Stillness:
    """Return the stillness after a further look; no sights mean that nothing can be said now."""
    again = bool(sights) and sights == before.sights
    return Stillness(sights, before.times + 1 if again else 0)


def judge(sights: Sequence[RankSight], stopped: Collection[Rank], timeout_s: float) -> HangVerdict:
    """Say who keeps the others from going on. `stopped` are the ranks whose process is stopped by a signal."""
    culprits = _culprits(sights, stopped)
    others = [sight for sight in sights if sight not in culprits]
    told = [_describe(sight, stopped) for sight in (*culprits, *others)]
    more = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return HangVerdict(culprits, f"no rank has made progress for {timeout_s:g} s: {'; '.join(told[:_TOLD])}{more}")


def _culprits(sights: Sequence[RankSight], stopped: Collection[Rank]) -> tuple[RankSight, ...]:
    halted = tuple(sight for sight in sights if sight.rank in stopped)
    if halted:
        return halted
    idle = tuple(sight for sight in sights if not sight.waits)
    if 0 < len(idle) < len(sights):
        return idle
    # All wait, as when one issued a collective ahead and hangs before it asks for the result; or none does, as with NCCL,
    # where the host never waits. Whoever is behind then keeps the others; if all are level, the script's logic does.
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
    """Return what is seen of every rank; nothing unless all are in their loop, where progress shows on the status page."""
    if state.phase is not JobPhase.RUNNING:
        return ()
    sights = []
    for seat in state.seats:
        rank_entry = status_page.rank_entries[seat.rank]
        if seat.owner is None:
            continue  # it left the script
        if rank_entry.phase not in _IN_LOOP:
            return ()
        phase = Phase(rank_entry.phase)
        sights.append(
            RankSight(
                seat.rank,
                seat.owner,
                rank_entry.epoch,
                phase,
                rank_entry.completed,
                rank_entry.issued,
                rank_entry.waited,
            )
        )
    return tuple(sights)


def is_stopped(pid: int) -> bool:
    """Tell whether the process is stopped by a signal (state T of proc_pid_stat(5); a debugger's stop is another)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] == "T"  # the name in parentheses may hold anything


class HangDetector:
    """Looks at the ranks a few times per time-out, by one timer, and submits `WorkerHung` of those that hang.

    `look` returns what is seen now, `pid` the process of a living worker. `say` is told of a hang that blames nobody.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        look: Callable[[], tuple[RankSight, ...]],
        pid: Callable[[WorkerId], int | None],
        submit: Callable[[Event], None],
        say: Callable[[str], None],
    ) -> None:
        """Begin, in the running loop. A `timeout_s` of 0 never looks."""
        self._timeout_s = timeout_s
        self._look = look
        self._pid = pid
        self._submit = submit
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._stillness = Stillness()
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s > 0:
            self._set_timer()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / LOOKS, self._look_again)

    def _look_again(self) -> None:
        self._set_timer()
        self._stillness = looked(self._stillness, self._look())
        times = self._stillness.times
        if times == 0 or times % LOOKS != 0:
            return
        sights = self._stillness.sights
        verdict = judge(sights, {sight.rank for sight in sights if self._stopped(sight)}, self._timeout_s)
        if verdict.culprits:
            self._stillness = Stillness()
        elif times == LOOKS:
            self._say(
                f"the job hangs, and no rank is to blame more than another, so that none is ended: {verdict.reason}"
            )
        for culprit in verdict.culprits:
            self._submit(WorkerHung(culprit.worker, verdict.reason))

    def _stopped(self, sight: RankSight) -> bool:
        pid = self._pid(sight.worker)
        return pid is not None and is_stopped(pid)
