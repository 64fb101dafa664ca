"""A node's connection to the leader on another node: sends facts, receives orders."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any

from deadpool_run.coordinator.link import PeerLink
from deadpool_run.core.events import Event, StopRequested
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import peers

_ANSWER_S = 4.0
"""Less than a viewer waits, so that the viewer gets a reason instead of a timeout."""
_UNREACHED = {"error": "the job's leader does not answer: try again in a few seconds"}


class LostError(Exception):
    """The leader has declared this node lost, or will; the text says why."""


class EndedError(Exception):
    """The job has ended, or does not admit this node."""

    def __init__(self, end: peers.End) -> None:
        super().__init__(end.reason)
        self.end = end


class RedirectError(Exception):
    """Another node leads the job."""

    def __init__(self, leader: peers.Peer) -> None:
        super().__init__(f"{leader.node} leads the job")
        self.leader = leader


class NoLeader:
    """Stands for the leader while there is none. Drops what the next leader will ask for anyway."""

    def __init__(self) -> None:
        self.requests: list[StopRequested] = []

    def fact(self, event: Event) -> None:
        """Keep a user's request for the next leader."""
        if isinstance(event, StopRequested):
            self.requests.append(event)

    def safe(self, news: peers.Safe) -> None:
        """Drop it: the node sends all of it again."""

    def durable_news(self, news: peers.Saved | peers.Loaded | peers.PreemptionNotice) -> None:
        """Drop it: the next leader starts new attempts, and gets the preemption notice again."""


class Follower:
    """One connection. Messages that come before `begin` are handled then, in order."""

    def __init__(self, sock: socket.socket, first_word: peers.Join | peers.Rejoin) -> None:
        loop = asyncio.get_running_loop()
        self._early: list[peers.Message] = []
        self._taken: asyncio.Future[tuple[peers.Joined, peers.Agents]] = loop.create_future()
        self._joined: peers.Joined | None = None
        self._answered: asyncio.Future[bool] = loop.create_future()
        self._asked = 0
        self._answers: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._on_message: Callable[[peers.Message], None] | None = None
        self._on_lost: Callable[[str, bool], None] | None = None
        self._link = PeerLink(sock, self._handle, self._broken)
        self._link.send(first_word)

    async def admitted(self, stop: asyncio.Future[tuple[int, str]]) -> tuple[peers.Joined, peers.Agents]:
        """Return the leader's answer to `Join`. Raises `EndedError` if it refuses this node, `LostError` and `RedirectError`."""
        await asyncio.wait({self._taken, stop}, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if self._taken.done():
            return self._taken.result()
        raise EndedError(peers.End(*stop.result()))

    @property
    def was_answered(self) -> bool:
        """Whether the leader has sent anything. Until then the end of the connection proves nothing."""
        return self._answered.done() and not self._answered.cancelled() and self._answered.result()

    async def answered(self) -> bool:
        """Wait for the first message or the end of the connection; return whether a leader answered.

        An agent that redirects to another is no leader.
        """
        return await self._answered

    def begin(self, on_message: Callable[[peers.Message], None], on_lost: Callable[[str, bool], None]) -> None:
        """Handle messages, those that came before included; `on_lost` as of a `PeerLink`."""
        self._on_message, self._on_lost = on_message, on_lost
        early, self._early = self._early, []
        try:
            for message in early:
                on_message(message)
        except ProtocolError as error:
            self._link.close()
            on_lost(f"protocol error: {error}", False)
            return
        if not self._link.open:
            on_lost("its connection was closed", True)

    async def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the leader's answer to a viewer's request, or why there is none, within a few seconds."""
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            if not self._link.open:
                return _UNREACHED
            self._link.send(peers.Ask(number, dict(request)))
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            return _UNREACHED
        finally:
            del self._answers[number]

    def take_answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Pass an answer to the request that waits for it."""
        waiting = self._answers.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def close(self) -> None:
        """Close the connection."""
        self._link.close()
        self._fail_requests()
        if not self._answered.done():
            self._answered.set_result(False)
        if self._taken.done() and not self._taken.cancelled():
            self._taken.exception()  # retrieved, or asyncio warns
        self._taken.cancel()

    def send(self, message: peers.ToLeader) -> None:
        """Send a message."""
        self._link.send(message)

    def fact(self, event: Event) -> None:
        """Send a fact of this node."""
        self._link.send(peers.Fact(event))

    def safe(self, news: peers.Safe) -> None:
        """Send what other nodes hold of a rank that lives here."""
        self._link.send(news)

    def durable_news(self, news: peers.Saved | peers.Loaded | peers.PreemptionNotice) -> None:
        """Send news of durable checkpoints."""
        self._link.send(news)

    def _handle(self, message: peers.Message) -> None:
        if not self._answered.done():
            self._answered.set_result(not isinstance(message, peers.Redirect))
        if self._on_message is not None:
            self._on_message(message)
            return
        self._early.append(message)
        if self._taken.done():
            return
        match message:
            case peers.Joined():
                self._joined = message
            case peers.Agents() if self._joined is not None:
                self._taken.set_result((self._joined, message))
            case peers.End():
                self._taken.set_exception(EndedError(message))
            case peers.Redirect(leader):
                self._taken.set_exception(RedirectError(leader))
            case peers.Evict(reason):
                self._taken.set_exception(LostError(reason))
            case _:
                pass

    def _fail_requests(self) -> None:
        for number in self._answers:
            self.take_answer(number, _UNREACHED)

    def _broken(self, why: str, closed: bool) -> None:
        self._fail_requests()
        if not self._answered.done():
            self._answered.set_result(False)
        if self._on_lost is not None:
            self._on_lost(why, closed)
        elif not self._taken.done():
            self._taken.set_exception(LostError(f"the leader cannot be reached: {why}"))
