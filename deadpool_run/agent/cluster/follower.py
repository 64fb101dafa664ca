"""A node's connection with a coordinator that lives elsewhere: facts go up it, orders come down."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any

from deadpool_run.coordinator.link import PeerLink
from deadpool_run.core.events import Event, StopRequested
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import peers

_ANSWER_S = 4.0
"""Less than a viewer waits, so that it hears why there is no answer."""
_UNREACHED = {"error": "the node that leads the job does not answer: ask again in a few seconds"}


class LostError(Exception):
    """The coordinator takes this node for lost, or will; the text says why."""


class EndedError(Exception):
    """The job is over, or does not take us in."""

    def __init__(self, end: peers.End) -> None:
        super().__init__(end.reason)
        self.end = end


class RedirectError(Exception):
    """Somebody else leads the job."""

    def __init__(self, leader: peers.Peer) -> None:
        super().__init__(f"{leader.node} leads the job")
        self.leader = leader


class NoLeader:
    """Above a node while nobody leads: what the next coordinator asks for anyway is dropped."""

    def __init__(self) -> None:
        self.wishes: list[StopRequested] = []

    def fact(self, event: Event) -> None:
        """Keep a user's wish."""
        if isinstance(event, StopRequested):
            self.wishes.append(event)

    def safe(self, told: peers.Safe) -> None:
        """Drop it: all is told again."""

    def durable_news(self, told: peers.Saved | peers.Loaded | peers.PreemptionNotice) -> None:
        """Drop it: the next coordinator begins its checkpoints anew, and is told again that the end was foretold."""


class Follower:
    """One connection. `begin` says who hears of it; what came before is heard then, in order."""

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
        self._link = PeerLink(sock, self._heard, self._lost)
        self._link.send(first_word)

    async def taken_in(self, stop: asyncio.Future[tuple[int, str]]) -> tuple[peers.Joined, peers.Agents]:
        """Return what the coordinator answers to `Join`. Raises `EndedError` if it does not take us in, `LostError` and `RedirectError`."""
        await asyncio.wait({self._taken, stop}, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if self._taken.done():
            return self._taken.result()
        raise EndedError(peers.End(*stop.result()))

    @property
    def was_answered(self) -> bool:
        """Whether the coordinator has said anything: until then an end of the connection proves nothing."""
        return self._answered.done() and not self._answered.cancelled() and self._answered.result()

    async def answered(self) -> bool:
        """Return whether a coordinator says anything, once it has, or once the connection has ended.

        One who says that another leads is none.
        """
        return await self._answered

    def begin(self, on_message: Callable[[peers.Message], None], on_lost: Callable[[str, bool], None]) -> None:
        """Have what is and was said heard; `on_lost` as of a `PeerLink`."""
        self._on_message, self._on_lost = on_message, on_lost
        early, self._early = self._early, []
        try:
            for message in early:
                on_message(message)
        except ProtocolError as error:
            self._link.close()
            on_lost(f"it broke the protocol: {error}", False)
            return
        if not self._link.open:
            on_lost("its connection was closed", True)

    async def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the coordinator's answer to a viewer's request, or why there is none; soon, in any case."""
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

    def told(self, number: int, answer: Mapping[str, Any]) -> None:
        """Pass on an answer to whoever still waits for it."""
        waiting = self._answers.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def close(self) -> None:
        """Hang up."""
        self._link.close()
        self._answer_nobody()
        if not self._answered.done():
            self._answered.set_result(False)
        if self._taken.done() and not self._taken.cancelled():
            self._taken.exception()  # looked at, so that nobody warns of it
        self._taken.cancel()

    def send(self, message: peers.ToLeader) -> None:
        """Say something."""
        self._link.send(message)

    def fact(self, event: Event) -> None:
        """Pass on what has happened here."""
        self._link.send(peers.Fact(event))

    def safe(self, told: peers.Safe) -> None:
        """Pass on what other nodes hold of a rank of ours."""
        self._link.send(told)

    def durable_news(self, told: peers.Saved | peers.Loaded | peers.PreemptionNotice) -> None:
        """Pass on what concerns durable checkpoints."""
        self._link.send(told)

    def _heard(self, message: peers.Message) -> None:
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

    def _answer_nobody(self) -> None:
        for number in self._answers:
            self.told(number, _UNREACHED)

    def _lost(self, why: str, closed: bool) -> None:
        self._answer_nobody()
        if not self._answered.done():
            self._answered.set_result(False)
        if self._on_lost is not None:
            self._on_lost(why, closed)
        elif not self._taken.done():
            self._taken.set_exception(LostError(f"the coordinator is out of reach: {why}"))
