"""A node's connection with a coordinator that lives elsewhere: facts go up it, orders come down."""

import asyncio
import socket
from typing import Any

from deadpool_run.agent.node import Node
from deadpool_run.coordinator.link import Link
from deadpool_run.core.events import Event
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import peers
from deadpool_run.wire.facts import decode_effect, encode


class LostError(Exception):
    """The coordinator takes this node for lost, or will; the text says why."""


class Follower:
    """One membership. When it is lost, the node's workers are ended at once: somebody else has their ranks now."""

    def __init__(self, sock: socket.socket, timeout_s: float, join: peers.Join) -> None:
        """Ask to be taken in."""
        loop = asyncio.get_running_loop()
        self._node: Node | None = None
        self._early: list[peers.Message] = []
        self._joined: asyncio.Future[peers.Joined] = loop.create_future()
        self._end: asyncio.Future[peers.End] = loop.create_future()
        self._link = Link(
            sock,
            timeout_s=timeout_s,
            on_message=self._heard,
            on_lost=lambda why, _: self._lose(f"the coordinator is out of reach: {why}"),
            beat=self._beat,
        )
        self._link.send(join)

    @property
    def is_member(self) -> bool:
        """Whether the coordinator has taken this node in, and has not lost it."""
        return self._joined.done() and not self._end.done()

    async def joined(self, stop: asyncio.Future[tuple[int, str]]) -> peers.Joined:
        """Return what the coordinator answers. Raises `LostError`, and `EndedError` if the job is over or refuses us."""
        waited: set[asyncio.Future[Any]] = {self._joined, self._end, stop}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._joined.done():
            return self._joined.result()
        raise EndedError(self._end.result() if self._end.done() else peers.End(*stop.result()))

    async def follow(self, node: Node, stop: asyncio.Future[tuple[int, str]]) -> peers.End:
        """Obey until the job is over. Raises `LostError` once this node is none of it any more."""
        self._node = node
        early, self._early = self._early, []
        for message in early:
            self._obey(node, message)
        waited: set[asyncio.Future[Any]] = {self._end, stop}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        return self._end.result() if self._end.done() else peers.End(*stop.result())

    def close(self) -> None:
        """Hang up."""
        self._link.close()
        for future in (self._joined, self._end):
            if future.done() and not future.cancelled():
                future.exception()  # looked at, so that nobody warns of it
            future.cancel()

    def fact(self, event: Event) -> None:
        """Pass on what has happened here."""
        self._link.send(peers.Fact(encode(event)))

    def safe(self, told: peers.Safe) -> None:
        """Pass on what other nodes hold of a rank of ours."""
        self._link.send(told)

    def _beat(self) -> peers.Beat:
        return peers.Beat() if self._node is None else self._node.beat()

    def _heard(self, message: peers.Message) -> None:
        match message:
            case peers.Joined():
                if not self._joined.done():
                    self._joined.set_result(message)
            case peers.End():
                if not self._end.done():
                    self._end.set_result(message)
            case peers.Evict(reason):
                self._link.close()
                self._lose(f"the coordinator takes this node for lost: {reason}")
            case _ if self._node is None:
                self._early.append(message)
            case _:
                self._obey(self._node, message)

    def _obey(self, node: Node, message: peers.Message) -> None:
        match message:
            case peers.World():
                node.set_world(message)
            case peers.Order(effect, capture_interval, source):
                node.perform(decode_effect(effect), capture_interval, source)
            case peers.Buddies():
                node.set_buddies(message)
            case peers.Committed():
                node.committed(message)
            case _:
                raise ProtocolError(f"a coordinator does not say {type(message).__name__}")

    def _lose(self, why: str) -> None:
        if self._node is not None:
            self._node.end_workers()  # before all else: their ranks are, or will be, somebody else's
        if not self._end.done():
            self._end.set_exception(LostError(why))


class EndedError(Exception):
    """The job is over, or does not take us in."""

    def __init__(self, end: peers.End) -> None:
        super().__init__(end.reason)
        self.end = end
