"""A connection between agents: what is said arrives in order, and its end is told once, soon, and with the right reason."""

import asyncio
import socket
import struct

import pytest
from kit.ends import End, pair, tcp_pair, within_bound
from kit.tagged import tagged, tagged_pair

from deadpool_run.core.events import WorkerStarted
from deadpool_run.ids import WorkerId
from deadpool_run.transport import link as link_module
from deadpool_run.wire import peers

BIG = peers.Evict("x" * (1 << 20))


def test_what_is_said_arrives_in_order_both_ways():
    async def main():
        one, other = pair()
        up = [peers.Fact(WorkerStarted(WorkerId(number), number)) for number in range(500)]
        down = [peers.Committed(1, number, ()) for number in range(500)]
        one.send(*up)
        other.send(*down)
        assert await other.hears(500) == up
        assert await one.hears(500) == down
        one.close()
        other.close()

    within_bound(main())


def test_what_is_larger_than_any_buffer_arrives_whole():
    async def main():
        one, other = pair()
        one.send(*[BIG] * 12)
        assert await other.hears(12) == [BIG] * 12
        one.close()
        other.close()

    within_bound(main())


def test_a_closed_connection_is_told_at_once_after_what_was_said_before():
    async def main():
        one, other = pair()
        one.send(peers.End(3, "over"))
        one.close()
        assert await other.is_lost() == ("its connection was closed", True)
        assert other.heard == [peers.End(3, "over")]
        assert not other.link.open
        assert not one.lost

    within_bound(main())


def test_a_connection_that_the_peer_no_longer_knows_ends_without_a_word_of_ours():
    """As after a firewall's reset that only the peer got: TCP_REPAIR has its end vanish, and nothing is sent."""
    mine, theirs = tcp_pair()
    try:
        theirs.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR, tcp(7)
    except PermissionError:
        mine.close()
        theirs.close()
        pytest.skip("needs CAP_NET_ADMIN")

    async def main():
        one = End(tagged(mine))
        one.link.expect_word_within(1.0)
        theirs.close()
        assert await one.is_lost() == ("its connection broke: Connection reset by peer", True)

    within_bound(main())


def test_a_connection_that_is_reset_was_closed():
    async def main():
        mine, theirs = tcp_pair()
        end = End(tagged(mine))
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        why, closed = await end.is_lost()
        assert closed
        assert "reset" in why

    within_bound(main())


def test_what_was_said_before_the_end_is_heard_by_one_who_cannot_answer_any_more():
    async def main():
        mine, theirs = tagged_pair()
        end = End(mine)
        theirs.send(peers.encode(peers.End(3, "over")))
        theirs.close()
        end.send(*[peers.Evict("")] * 3)
        await end.is_lost()
        assert end.heard == [peers.End(3, "over")]

    within_bound(main())


def test_one_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(link_module, "MAX_UNSENT_BYTES", 4 << 20)

    async def main():
        mine, deaf = tagged_pair()
        end = End(mine)
        for _ in range(64):
            end.send(BIG)
            if end.lost:
                break
        assert await end.is_lost() == (f"it does not read: {end.link._unsent_bytes} bytes wait for it", False)
        deaf.close()

    within_bound(main())


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", peers.MAX_FRAME_BYTES + 1),
        struct.pack(">I", 2) + b"{}",
        struct.pack(">I", 2) + b"[[",
        struct.pack(">I", 4000) + b"[" * 4000,
    ],
)
def test_one_that_is_confused_is_hung_up_on(said):
    async def main():
        mine, theirs = tagged_pair()
        end = End(mine)
        theirs.send(peers.encode(peers.End(0, "")), said)
        why, closed = await end.is_lost()
        assert why.startswith("it broke the protocol: ")
        assert not closed
        assert end.heard == [peers.End(0, "")]
        assert theirs.sock.recv(1) == b""
        theirs.close()

    within_bound(main())


def test_nothing_is_told_of_a_link_that_was_closed_here():
    async def main():
        mine, theirs = tagged_pair()
        heard = []

        def hear(message):
            heard.append(message)
            end.link.close()

        end = End(mine)
        end.link._on_message = hear
        theirs.send(peers.encode(peers.End(0, "first")), peers.encode(peers.End(0, "second")))
        assert await asyncio.get_running_loop().run_in_executor(None, theirs.sock.recv, 1) == b""
        end.close()
        end.send(peers.Evict(""))
        assert heard == [peers.End(0, "first")]
        assert not end.lost
        theirs.close()

    within_bound(main())


def test_a_last_word_is_read_before_the_end():
    async def main():
        one, other = pair()
        one.send(*[BIG] * 12, peers.End(3, "over"))
        one.link.close_when_flushed()
        assert await other.hears(13) == [*[BIG] * 12, peers.End(3, "over")]
        assert (await other.is_lost())[1]
        assert not one.lost

    within_bound(main())
