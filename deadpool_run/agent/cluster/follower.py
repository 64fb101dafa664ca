"""A node's connection to the leader on another node: sends facts, receives orders."""

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from deadpool_run.agent.console import tell
from deadpool_run.core.events import StopRequested
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId
from deadpool_run.transport.link import PeerLink
from deadpool_run.transport.link_session import LinkSession
from deadpool_run.wire import peers
from deadpool_run.wire.auth import GreetingRefusedError
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.typed import to_json

_ANSWER_S = 4.0
"""Less than a viewer waits, so that the viewer gets a reason instead of a timeout."""
_RETRY_S, _MAX_RETRY_S = 0.02, 0.5
"""Pause before a leader is dialled again; it doubles each time, until a connection has lasted longer than the longest."""
_ASK_KERNEL = 0.6
"""Part of the silence after which the kernel asks. The leader sends a heartbeat in less."""
_UNREACHED = to_json({"error": "the job's leader does not answer: try again in a few seconds"})


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
        self.requests: list[peers.Fact] = []

    def report(self, report: peers.NodeReport) -> None:
        """Keep a user's request for the next leader, which asks for all facts and starts new attempts at checkpoints."""
        if isinstance(report, peers.Fact) and isinstance(report.event, StopRequested):
            self.requests.append(report)


class Follower:
    """One leader of one term. Messages that come before `begin` are handled then, in order.

    A node that rejoins, perhaps again and again, keeps its `session`: reports wait for the leader's word which it lacks. With
    `keep_connected` a connection that breaks, or is silent, is replaced by another, and no message is lost by that.
    """

    def __init__(
        self, connection: PeerConnection, first_word: peers.Join | peers.Rejoin, session: LinkSession | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.asked_at = loop.time()
        """When the leader was asked to take the node in."""
        self._early: list[peers.Message] = []
        self._taken: asyncio.Future[tuple[peers.Joined, peers.Agents]] = loop.create_future()
        self._joined: peers.Joined | None = None
        self._answered: asyncio.Future[bool] = loop.create_future()
        self._asked = 0
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._on_message: Callable[[peers.Message], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._session = session or LinkSession()
        self._closed = self._complained = False
        self._resumed = session is None
        """The leader has answered on the present connection, so that messages can be sent."""
        self._heard = asyncio.Event()
        """Something came, or the connection ended."""
        self._task: asyncio.Task[None] | None = None
        self._link = PeerLink(connection, self._handle, self._broken)
        self._link.send(first_word)

    async def admitted(
        self, stop: asyncio.Future[tuple[int, str]], timeout_s: float
    ) -> tuple[peers.Joined, peers.Agents]:
        """Return the leader's answer to `Join`. Raises `EndedError` if it refuses this node, `LostError` and `RedirectError`.

        A leader whose machine fails before it answers would be waited for without end: nothing is sent meanwhile.
        """
        both: set[asyncio.Future[Any]] = {self._taken, stop}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._taken.done():
            return self._taken.result()
        if stop.done():
            raise EndedError(peers.End(*stop.result()))
        raise LostError(f"the leader did not answer within {timeout_s:g} s")

    @property
    def was_answered(self) -> bool:
        """Whether the leader has sent anything. Until then the end of the connection proves nothing."""
        return self._answered.done() and self._answered.result()

    async def answered(self, silence_s: float) -> bool:
        """Wait for the first message or the end of the connection, up to `silence_s`; return whether a leader answered.

        An agent that redirects to another is no leader.
        """
        await asyncio.wait({self._answered}, timeout=_spread(silence_s))
        return self.was_answered

    def begin(self, on_message: Callable[[peers.Message], None], on_lost: Callable[[], None]) -> None:
        """Handle messages, those that came before included. `on_lost` is called when the connection ends."""
        self._on_message, self._on_lost = on_message, on_lost
        early, self._early = self._early, []
        try:
            for message in early:
                on_message(message)
        except ProtocolError as error:
            self._complain(error)
            self._link.close()
        if not self._link.open:
            on_lost()

    def keep_connected(
        self, node: NodeId, term: int, dial: Callable[[], Awaitable[PeerConnection]], silence_s: float
    ) -> None:
        """Make a new connection whenever this one breaks, or is silent for `silence_s`."""
        if self._closed:
            return
        self._expect_word(silence_s)
        self._task = asyncio.get_running_loop().create_task(self._mend(node, term, dial, silence_s))

    async def _mend(
        self, node: NodeId, term: int, dial: Callable[[], Awaitable[PeerConnection]], silence_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        pause_s, connected_at, patience_s = _RETRY_S, self.asked_at, _spread(silence_s)
        while True:
            self._heard.clear()
            with contextlib.suppress(TimeoutError):
                if self._link.open:
                    # Not `wait_for`: before Python 3.12 it may not end when it is cancelled.
                    async with asyncio.timeout(patience_s):
                        await self._heard.wait()
                    if self._link.open:
                        continue
            self._link.close()
            self._resumed = False
            if loop.time() > connected_at + _MAX_RETRY_S:
                pause_s = _RETRY_S
            connected_at = math.inf
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)
            with contextlib.suppress(OSError, GreetingRefusedError):
                self._link = PeerLink(await dial(), self._handle, self._broken)
                connected_at = loop.time()
                self._link.send(peers.ResumeLink(node, term, self._session.received))
                self._expect_word(silence_s)

    def _expect_word(self, silence_s: float) -> None:
        if self._link.open:
            self._link.expect_word_within(_ASK_KERNEL * silence_s)

    async def ask(self, request: Mapping[str, Any]) -> bytes:
        """Return the leader's answer to a viewer's request, or why there is none, within a few seconds, encoded."""
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            if not self._link.open:
                return _UNREACHED
            self.report(peers.Ask(number, dict(request)))
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            return _UNREACHED
        finally:
            del self._answers[number]

    def take_answer(self, number: int, answer: bytes) -> None:
        """Pass an answer to the request that waits for it."""
        waiting = self._answers.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._link.close()
        self._fail_requests()
        if not self._answered.done():
            self._answered.set_result(False)
        if self._taken.done() and not self._taken.cancelled():
            self._taken.exception()  # retrieved, or asyncio warns
        self._taken.cancel()

    @property
    def received(self) -> int:
        """The number of the leader's messages that came."""
        return self._session.received

    def answer(self, ack: peers.HeartbeatAck) -> None:
        """Answer a heartbeat, by the present connection or not at all."""
        self._link.send(ack)

    def report(self, message: peers.ToLeader) -> None:
        """Send a message to the leader, now or when there is a connection again."""
        frame = peers.encode(message)
        self._session.sent(frame)
        if self._resumed:
            self._link.send_frame(frame)

    def _resume(self, received: int) -> None:
        rest = self._session.rest(received)
        if rest is None:
            self._link.close()  # the leader gives this node up
            return
        self._resumed = True
        for frame in rest:
            self._link.send_frame(frame)

    def _handle(self, message: peers.Message) -> None:
        self._heard.set()
        if isinstance(message, peers.LinkResumed):
            self._resume(message.received)
            return
        if isinstance(message, peers.End):
            self._link.send(peers.EndConfirmed())
        if isinstance(message, peers.Heartbeat):
            self._session.confirmed(message.received)
        else:
            self._session.received += 1
        if not self._answered.done():
            self._answered.set_result(not isinstance(message, peers.Redirect))
        if self._on_message is not None:
            self._on_message(message)
            return
        self._early.append(message)
        if not self._taken.done():
            self._admit(message)

    def _admit(self, message: peers.Message) -> None:
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

    def _complain(self, why: Exception) -> None:
        """Say once that this leader's messages cannot be handled: other connections may bring more of them."""
        if isinstance(why, ProtocolError) and not self._complained:
            self._complained = True
            tell(f"a message of the leader ended the connection: {why}; this node connects again, less and less often")

    def _broken(self, why: Exception) -> None:
        self._complain(why)
        self._heard.set()
        self._fail_requests()
        if not self._answered.done():
            self._answered.set_result(False)
        if self._on_lost is not None:
            self._on_lost()
        elif not self._taken.done():
            self._taken.set_exception(LostError(f"the leader cannot be reached: {why}"))


def _spread(silence_s: float) -> float:
    """Return up to half as long again: the leader may just be busy, and not all nodes are to dial it at the same time."""
    return silence_s * random.uniform(1.0, 1.5)  # noqa: S311 - no secret
