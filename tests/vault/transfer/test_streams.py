"""A segment that goes over several connections is the one that goes over one, and nothing of it is believed half."""

import asyncio
import threading

import pytest
from kit.tagged import tagged_pair
from vault_kit import KIB, LIMIT_S, cluster, connect, content, in_loop, off

from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Rank
from deadpool_run.vault.transfer import chunks, framing, headers, streams
from deadpool_run.vault.transfer.framing import Outcome
from deadpool_run.vault.transfer.streams import StreamPool, StripedReceive, StripedReceives, worthwhile

BODY_BYTES = 3000 * KIB
"""More than one block a part."""


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(streams, "MIN_PART_BYTES", 64 * KIB)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 16 * KIB)


class Dialled:
    """Connects, and notes what it has."""

    def __init__(self, most=None):
        self.connections = []
        self.most = most

    def __call__(self, address, port):
        if self.most is not None and len(self.connections) >= self.most:
            raise ConnectionRefusedError("no more of them")
        self.connections.append(connect(address, port))
        return self.connections[-1]


# --- parts -----------------------------------------------------------------------------------------------------------


def test_what_is_small_goes_over_one_connection():
    least = streams.MIN_PART_BYTES
    assert [worthwhile(nbytes, 4) for nbytes in (1, 2 * least - 1, 2 * least, 100 * least)] == [1, 1, 2, 4]
    assert worthwhile(1000 * least, 99) == streams.MAX_PARTS


# --- between nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [None, 2, 1])
@in_loop
async def test_a_large_snapshot_is_sent_over_as_many_connections_as_there_are(most, small_parts):
    dial = Dialled(most)
    async with cluster("a", "b", dial=dial, streams=4) as (a, b):
        a.complete_transcript(0)
        for version in range(3):
            a.capture(0, version, body=content(0, version, nbytes=BODY_BYTES))
            a.copies_to(b)
            await a.until(lambda version=version: 0 in a.told and version in a.told[0][0])
            assert b.copy_of(0, version) == content(0, version, nbytes=BODY_BYTES)
        assert len(dial.connections) == (most or 4), "and they are used again"


@pytest.mark.parametrize("most", [None, 3, 2])
@in_loop
async def test_a_large_snapshot_is_fetched_over_as_many_connections_as_there_are(most, small_parts):
    dial = Dialled()
    async with cluster("a", "b", dial=dial, streams=4) as (a, b):
        a.capture(0, 4, body=content(0, 4, nbytes=BODY_BYTES))
        a.complete_transcript(0)
        assert await b.seat(0, a.peer) is None
        before = len(dial.connections)
        dial.most = most and before + most
        assert await b.fetch(0, 4, a.peer) is None
        assert b.body(0, 4) == content(0, 4, nbytes=BODY_BYTES)
        assert len(dial.connections) - before == (most or 4)


@in_loop
async def test_what_the_buddy_has_is_left_out_of_every_part(small_parts):
    async with cluster("a", "b", streams=4) as (a, b):
        a.complete_transcript(0)
        a.copies_to(b)
        same, other = content(7, 7, nbytes=BODY_BYTES), content(0, 0, nbytes=BODY_BYTES)
        b.capture(1, 3, body=same + content(1, 1, nbytes=BODY_BYTES))
        a.capture(0, 3, body=same + other)
        await a.until(lambda: 0 in a.told and a.told[0][0] == (3,))
        assert b.copy_of(0, 3) == same + other
        assert a.replicator.traffic().sent_bytes < 1.2 * BODY_BYTES


@in_loop
async def test_a_connection_that_breaks_takes_the_delivery_with_it_and_it_is_made_again(small_parts, monkeypatch):
    monkeypatch.setattr(framing, "TIMEOUT_S", 60.0)  # nobody waits for that
    dial = Dialled()
    async with cluster("a", "b", dial=dial, streams=4) as (a, b):
        a.complete_transcript(0)
        a.capture(0, 0, body=content(0, 0, nbytes=BODY_BYTES))
        a.copies_to(b)
        await a.until_safe(0, 0)
        framing.shut_down(dial.connections[2].sock)
        a.capture(0, 1, body=content(0, 1, nbytes=BODY_BYTES))
        await a.until_safe(0, 0, 1)
        assert b.copy_of(0, 1) == content(0, 1, nbytes=BODY_BYTES)


# --- one end at a time -----------------------------------------------------------------------------------------------


def take(connection, _part, _of):
    """Receive a part that consists of its outcome."""
    return Outcome(framing.receive_exactly(connection.sock, 1)[0])


def bring(striped_receive, part, of, outcome=Outcome.WHOLE, *, cut_off=False):
    """Bring a part on a thread of its own."""
    ours, theirs = tagged_pair()

    def run():
        with theirs:
            try:
                striped_receive.bring(part, of, theirs)
            except OSError:
                assert cut_off

    thread = threading.Thread(target=run)
    thread.start()
    if not cut_off:
        ours.sock.sendall(bytes([outcome]))
    ours.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (Outcome.WHOLE, Outcome.WHOLE, Outcome.WHOLE),
        (Outcome.WHOLE, Outcome.TORN, Outcome.TORN),
        (Outcome.TORN, Outcome.WHOLE, Outcome.TORN),
        (Outcome.DAMAGED, Outcome.WHOLE, Outcome.DAMAGED),
    ],
)
def test_the_whole_is_as_good_as_its_worst_part(first, second, expected):
    striped_receive = StripedReceive(take, 3)
    bring(striped_receive, 1, 3, second)
    bring(striped_receive, 2, 3)
    assert striped_receive.outcome(first) is expected
    striped_receive.close()


def test_a_part_that_breaks_off_or_never_comes_leaves_it_torn(monkeypatch):
    monkeypatch.setattr(framing, "TIMEOUT_S", 0.2)
    broken = StripedReceive(take, 2)
    bring(broken, 1, 2, cut_off=True)
    assert broken.outcome(Outcome.WHOLE) is Outcome.TORN
    missing = StripedReceive(take, 2)
    assert missing.outcome(Outcome.WHOLE) is Outcome.TORN


@pytest.mark.parametrize(("part", "of"), [(0, 2), (2, 2), (1, 3)])
def test_a_part_that_is_not_due_is_refused(part, of):
    striped_receive = StripedReceive(take, 2)
    with pytest.raises(ProtocolError):
        striped_receive.bring(part, of, None)


def test_a_part_comes_once_and_not_after_the_end():
    striped_receive = StripedReceive(take, 2)
    bring(striped_receive, 1, 2)
    with pytest.raises(ProtocolError):
        striped_receive.bring(1, 2, None)
    late = StripedReceive(take, 2)
    late.close()
    with pytest.raises(ProtocolError):
        late.bring(1, 2, None)


@in_loop
async def test_nobody_writes_any_more_once_a_striped_receive_is_closed():
    striped_receives, came = StripedReceives(), threading.Event()

    def take_much(connection, _part, _of):
        framing.receive_exactly(connection.sock, 1)
        came.set()
        framing.receive_exactly(connection.sock, 1)

    ours, theirs = tagged_pair()
    with ours, theirs:
        with striped_receives.running(b"d", StripedReceive(take_much, 2)):
            bringing = asyncio.create_task(off(striped_receives.find(b"d").bring, 1, 2, theirs))
            ours.sock.sendall(b"1")
            assert await off(came.wait, LIMIT_S)
        with pytest.raises(OSError, match="hung up"):
            await bringing


@in_loop
async def test_who_looks_for_a_striped_receive_waits_for_it_and_not_for_ever():
    striped_receives = StripedReceives()
    looking = asyncio.create_task(off(striped_receives.find, b"d"))
    begun = StripedReceive(take, 2)
    with striped_receives.running(b"d", begun):
        assert await looking is begun
    looking = asyncio.create_task(off(striped_receives.find, b"e"))
    striped_receives.close()
    with pytest.raises(ProtocolError):
        await looking


def test_a_stream_pool_says_what_went_wrong_and_leaves_no_thread():
    pairs = []

    def dial():
        pairs.append(tagged_pair())
        return pairs[-1][0]

    stream_pool = StreamPool(dial)
    stream_pool.first()
    assert stream_pool.open(2) == 2

    def fail(_):
        raise OSError("broken")

    def wait(connection):
        assert connection.sock.recv(1) == b"", "what fails ends the others' waits"

    with pytest.raises(OSError, match="broken"):
        stream_pool.work(lambda _: None, fail, wait)
    stream_pool.close()
    stream_pool.first()
    assert stream_pool.open(1) == 1, "after a close there are new ones"

    def own(_):
        raise KeyError("ours")

    with pytest.raises(KeyError):
        stream_pool.work(own, wait)
    stream_pool.close()
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


@in_loop
async def test_what_was_never_offered_has_no_parts(monkeypatch):
    monkeypatch.setattr(framing, "TIMEOUT_S", 0.2)
    async with cluster("a") as (a,):
        with connect(a.peer.address, a.peer.port) as connection:
            headers.send(connection, headers.PartHeader(bytes(16), 1, 2))
            assert await off(connection.sock.recv, 1) == b"", "the connection is given up"
        assert a.replicator.versions(Rank(0)) == ()
