"""The coordinator's server: sole owner of the state, which only `submit` changes."""

import asyncio
from collections import deque
from collections.abc import Callable

from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.log_follower import FollowedLog
from deadpool_run.core import coordinator
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event, RankReport, RanksReported, TimeAdvanced
from deadpool_run.core.settings import Settings

_MOST_TOGETHER = 64
"""Reports in one event, so that the lines of the journal and the messages of the log stay short."""


class CoordinatorServer:
    """Decides on one event at a time, in the order of arrival, and performs its orders before the next.

    Reports that each rank gives in a repair are decided on together, if they come in one turn of the loop.

    Time is the running loop's clock. After a takeover it continues from the last coordinator's clock.
    """

    def __init__(  # noqa: PLR0913 - what it acts on
        self,
        settings: Settings,
        perform: Callable[[Effect], None],
        journal: Journal,
        on_decided: Callable[[], None],
        known: FollowedLog | None = None,
        *,
        may_decide: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin a job, or continue from another coordinator's log.

        `perform` does not block. The results of an order arrive as new events. `on_decided` is called once after the decisions
        of one turn of the loop. While it may not decide, events wait for `resume`.
        """
        self._settings = settings
        self._perform = perform
        self._journal = journal
        self._on_decided = on_decided
        self._may_decide = may_decide
        self._held_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self.state = coordinator.new_state(settings) if known is None else known.state
        """To read, never to change. It changes with each event, so keep a copy to compare it later."""
        self._ahead_s = 0.0 if known is None else known.now - self._loop.time()
        self.entries = 0 if known is None else known.index.entries
        """The number of events that led to the state."""
        self.on_entry: Callable[[float, Event], None] | None = None
        """Called with each event and its time, before its orders are performed."""
        self._events: deque[Event] = deque()
        self._reports: list[RankReport] = []
        self._reports_due: asyncio.Handle | None = None
        self._deciding = False
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None

    def now(self) -> float:
        """Return the time of a decision made now: seconds, monotonic, also over a takeover from another machine."""
        return self._loop.time() + self._ahead_s

    def submit(self, event: Event) -> None:
        """Decide on an event. Performing an order may submit another: it waits for its turn.

        A decision that raises leaves the state half changed. The error ends the job, and nothing more is decided.
        """
        if not isinstance(event, RankReport):
            self._submit_reports()
            self._submit(event)
            return
        self._reports.append(event)
        if len(self._reports) >= _MOST_TOGETHER:
            self._submit_reports()
        elif self._reports_due is None:
            self._reports_due = self._loop.call_soon(self._submit_reports)

    def _submit_reports(self) -> None:
        if self._reports_due is not None:
            self._reports_due.cancel()
            self._reports_due = None
        reports, self._reports = self._reports, []
        if reports:
            self._submit(reports[0] if len(reports) == 1 else RanksReported(tuple(reports)))

    def _submit(self, event: Event) -> None:
        self._events.append(event)
        if self._deciding or self.state.is_void:
            return
        self._deciding = True
        try:
            while self._events and self._may_decide():
                self._decide(self._events.popleft())
        finally:
            self._deciding = False
        if self._turn is None:  # once for all events of a turn of the loop: nodes report for several workers together
            self._turn = self._loop.call_soon(self._end_turn)

    def hold(self) -> None:
        """Let events wait: for the job, time stands still."""
        if self._held_at is None:
            self._held_at = self.now()
        self.close()

    def resume(self) -> None:
        """Decide on the events that waited, as if no time had passed."""
        if self._held_at is not None:
            self._ahead_s -= self.now() - self._held_at
            self._held_at = None
            self.submit(TimeAdvanced())

    def close(self) -> None:
        """Decide nothing more."""
        for due in (self._timer, self._turn, self._reports_due):
            if due is not None:
                due.cancel()
        self._timer = self._turn = self._reports_due = None

    def _decide(self, event: Event) -> None:
        now = self.now()
        effects = coordinator.step(self._settings, self.state, event, now)
        self._journal.append(now, event, effects, self.state)
        self.entries += 1
        if self.on_entry is not None:
            self.on_entry(now, event)
        for effect in effects:
            self._perform(effect)

    def _end_turn(self) -> None:
        self._turn = None
        self._set_timer()
        self._on_decided()

    def _set_timer(self) -> None:
        """Keep one timer, for the state's next deadline."""
        deadline = None if self._held_at is not None else coordinator.next_deadline(self._settings, self.state)
        at = None if deadline is None else deadline - self._ahead_s
        if self._timer is not None:
            if self._timer.when() == at:
                return  # most events do not change it
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_at(at, self._reached)

    def _reached(self) -> None:
        self._timer = None  # a loop may call a little early, and the deadline still be there afterwards
        if self._may_decide():
            self.submit(TimeAdvanced())  # else `resume` does, after all events that waited
