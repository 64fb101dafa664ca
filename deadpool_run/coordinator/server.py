"""The shell of the coordinator: sole owner of its state. Every change of the state goes through `submit`."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from deadpool_run.coordinator.journal import Journal
from deadpool_run.core import coordinator
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event, TimeAdvanced
from deadpool_run.core.membership import State
from deadpool_run.core.settings import Settings


class Performer(Protocol):
    """Carries out orders. What comes of them arrives as new events, never as a return value."""

    def perform(self, effect: Effect) -> None:
        """Carry out one order; must not block."""


class CoordinatorServer:
    """Decides one event at a time, in the order of arrival, and has the decision carried out before the next.

    `now` is the running loop's clock: seconds, monotonic, of this machine.
    """

    def __init__(
        self, settings: Settings, performer: Performer, journal: Journal, on_decided: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._performer = performer
        self._journal = journal
        self._on_decided = on_decided
        self._loop = asyncio.get_running_loop()
        self._state = coordinator.new_state(settings)
        self._events: deque[Event] = deque()
        self._deciding = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> State:
        """To read, never to change."""
        return self._state

    def submit(self, event: Event) -> None:
        """Take a fact in. Performing an order may submit another: it waits for its turn."""
        self._events.append(event)
        if self._deciding:
            return
        self._deciding = True
        try:
            while self._events:
                self._decide(self._events.popleft())
        finally:
            self._deciding = False
        self._set_timer()
        self._on_decided()

    def close(self) -> None:
        """Decide nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _decide(self, event: Event) -> None:
        now = self._loop.time()
        self._state, effects = coordinator.step(self._settings, self._state, event, now)
        self._journal.append(now, event, effects)
        for effect in effects:
            self._performer.perform(effect)

    def _set_timer(self) -> None:
        """Keep exactly one timer: the state's next deadline."""
        if self._timer is not None:
            self._timer.cancel()
        deadline = coordinator.next_deadline(self._settings, self._state)
        self._timer = None if deadline is None else self._loop.call_at(deadline, self.submit, TimeAdvanced())
