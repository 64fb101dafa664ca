"""What a buddy has already is found there, and what it only seems to have is sent."""

import socket
import threading
from contextlib import closing

import pytest
from kit.processes import descriptors
from vault_kit import FakeBuddy, cluster, content, in_loop, off

from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Rank
from deadpool_run.vault.segments import HEADER_BYTES
from deadpool_run.vault.transfer import dedup
from deadpool_run.vault.transfer.catalog import find
from deadpool_run.vault.transfer.dedup import CHUNK_BYTES, ChunkHistory, ChunkLookup, chunk, chunks, rest
from deadpool_run.vault.transfer.headers import No

WEIGHTS = content(7, 7, nbytes=20 * CHUNK_BYTES)
"""Bytes that more than one rank has."""
SMALL = 2 * CHUNK_BYTES


def sent_by(node):
    return node.replicator.status()["sent_bytes"]


# --- ranges ----------------------------------------------------------------------------------------------------------


def test_the_chunks_cover_everything_behind_the_header():
    nbytes = HEADER_BYTES + 2 * CHUNK_BYTES + 5
    assert chunks(nbytes) == 3
    assert [chunk(index, nbytes) for index in range(3)] == [
        (HEADER_BYTES, HEADER_BYTES + CHUNK_BYTES),
        (HEADER_BYTES + CHUNK_BYTES, HEADER_BYTES + 2 * CHUNK_BYTES),
        (HEADER_BYTES + 2 * CHUNK_BYTES, nbytes),
    ]
    assert chunks(HEADER_BYTES) == 0


def test_what_is_left_to_send_is_the_header_and_what_was_not_found():
    nbytes = HEADER_BYTES + 4 * CHUNK_BYTES
    assert rest(nbytes, ()) == [(0, nbytes)]
    assert rest(nbytes, {0, 2}) == [(0, HEADER_BYTES), chunk(1, nbytes), chunk(3, nbytes)]
    assert rest(nbytes, {2, 3}) == [(0, chunk(1, nbytes)[1])]
    assert rest(nbytes, range(4)) == [(0, HEADER_BYTES)]
    assert rest(100, ()) == [(0, 100)]


def test_what_was_missed_three_times_on_end_is_asked_for_now_and_then():
    history, nbytes = ChunkHistory(), HEADER_BYTES + 100 * CHUNK_BYTES
    asked = []
    for _ in range(70):
        asked.append(history.worth_asking(nbytes))
        history.learn(asked[-1], {1, 2})
    assert all(sorted(each) == list(range(100)) for each in asked[:3]), "everything, in some order"
    assert [number for number, each in enumerate(asked) if len(each) == 100] == [0, 1, 2, 31, 63]
    assert all(sorted(each) == [1, 2] for number, each in enumerate(asked) if number not in {0, 1, 2, 31, 63})


def test_what_is_found_again_is_asked_for_again():
    history, nbytes = ChunkHistory(), HEADER_BYTES + 2 * CHUNK_BYTES
    for _ in range(31):
        history.learn(history.worth_asking(nbytes), {1})
    history.learn(history.worth_asking(nbytes), {0, 1})
    assert sorted(history.worth_asking(nbytes)) == [0, 1]


# --- between nodes ---------------------------------------------------------------------------------------------------


@in_loop
async def test_what_a_rank_of_the_buddy_has_at_the_same_version_is_not_sent():
    async with cluster("a", "b") as (a, b):
        for version in (3, 4):
            b.capture(1, version, body=WEIGHTS + b"rank 1, its own")
            a.capture(0, version, body=WEIGHTS + b"rank 0, also its own, and longer")
        a.seal(0)
        a.copies_to(b)
        await a.until(lambda: a.told[0][0] == (4,))
        assert b.copy_of(0, 4) == WEIGHTS + b"rank 0, also its own, and longer"
        assert sent_by(a) < SMALL
        assert a.replicator.status()["spared_bytes"] >= len(WEIGHTS) - CHUNK_BYTES
        assert a.replicator.status()["spared_bytes"] + sent_by(a) < 2 * len(WEIGHTS)


@in_loop
async def test_a_rank_of_the_buddy_that_is_late_is_waited_for():
    async with cluster("a", "b") as (a, b):
        b.capture(1, 3, body=WEIGHTS)
        a.seal(0)
        a.copies_to(b)
        await a.until(lambda: 0 in a.told and a.told[0][1])
        a.capture(0, 4, body=WEIGHTS[::-1])
        await b.until_waiting()
        b.capture(1, 4, body=WEIGHTS[::-1])
        await a.until(lambda: a.told[0][0] == (4,))
        assert sent_by(a) < SMALL
        assert b.copy_of(0, 4) == WEIGHTS[::-1]


@in_loop
async def test_a_rank_of_the_buddy_that_skips_the_version_is_not_waited_for_any_longer():
    async with cluster("a", "b") as (a, b):
        b.capture(1, 3, body=WEIGHTS)
        a.seal(0)
        a.copies_to(b)
        await a.until(lambda: 0 in a.told and a.told[0][1])
        a.capture(0, 4, body=WEIGHTS)
        await b.until_waiting()
        b.vault.status_page.rank_entries[1].skipped = 4
        b.replicator.skipped()
        await a.until(lambda: a.told[0][0] == (4,))
        assert b.copy_of(0, 4) == WEIGHTS
        assert sent_by(a) > len(WEIGHTS), "what is at another version is not looked at"


@in_loop
async def test_what_a_rank_does_not_change_is_sent_once():
    async with cluster("a", "b") as (a, b):
        a.seal(0)
        a.copies_to(b)
        for version in range(3):
            before = sent_by(a)
            body = WEIGHTS + content(0, version, nbytes=CHUNK_BYTES)
            a.capture(0, version, body=body)
            await a.until(lambda version=version: 0 in a.told and version in a.told[0][0])
            assert b.copy_of(0, version) == body
            sent = sent_by(a) - before
            assert sent > len(WEIGHTS) if version == 0 else sent < 3 * CHUNK_BYTES


@in_loop
async def test_what_another_rank_has_sent_is_not_sent_again():
    async with cluster("a", "b") as (a, b):
        b.replicator.keep({Rank(0), Rank(1)})
        for rank in (0, 1):
            a.seal(rank)
        a.capture(0, 5, body=WEIGHTS)
        a.replicator.set_buddies({Rank(0): (b.peer,), Rank(1): (b.peer,)})
        await a.until(lambda: a.told.get(0, ((),))[0] == (5,))
        before = sent_by(a)
        a.capture(1, 5, body=WEIGHTS)
        await a.until(lambda: a.told.get(1, ((),))[0] == (5,))
        assert sent_by(a) - before < SMALL
        assert b.copy_of(1, 5) == WEIGHTS


@in_loop
async def test_ranks_with_nothing_in_common_are_sent_whole():
    async with cluster("a", "b") as (a, b):
        a.seal(0)
        a.copies_to(b)
        for version in range(5):
            b.capture(1, version, body=content(1, version))
            a.capture(0, version)
            await a.until(lambda version=version: 0 in a.told and version in a.told[0][0])
            assert b.copy_of(0, version) == content(0, version)
        assert a.replicator.status()["spared_bytes"] == 0


@in_loop
async def test_a_byte_that_differs_is_sent():
    async with cluster("a", "b") as (a, b):
        for at in (0, len(WEIGHTS) // 2, len(WEIGHTS) - 1):
            other = bytearray(WEIGHTS)
            other[at] ^= 1
            b.capture(1, at, body=bytes(other))
            a.capture(0, at, body=WEIGHTS)
            a.seal(0)
            a.copies_to(b)
            await a.until(lambda at=at: 0 in a.told and at in a.told[0][0])
            assert b.copy_of(0, at) == WEIGHTS
        assert sent_by(a) < 8 * CHUNK_BYTES


@in_loop
async def test_a_replacement_gets_what_was_never_sent():
    async with cluster("a", "b", "c") as (a, b, c):
        b.capture(1, 4, body=WEIGHTS)
        a.capture(0, 4, body=WEIGHTS)
        a.seal(0)
        a.copies_to(b)
        await a.until_safe(0, 4)
        await a.close()
        b.capture(1, 5, body=WEIGHTS[::-1])
        b.capture(1, 6, body=WEIGHTS[::-1])
        assert await c.seat(0, b.peer) is None
        assert await c.fetch(0, 4, b.peer) is None
        assert c.body(0, 4) == WEIGHTS


async def buddy_with_transcript(a):
    """Return a buddy of rank 0 that has taken its transcript, and the transcript's token."""
    fake = FakeBuddy()
    a.seal(0)
    a.replicator.set_buddies({Rank(0): (fake.peer,)})
    await off(fake.accept)
    offer = await off(fake.offered)
    await off(fake.take, offer)
    fake.say_held(transcript=offer.token)
    return fake, offer.token


@in_loop
async def test_a_slot_that_is_overwritten_while_it_is_compared_is_torn():
    async with cluster("a") as (a,):
        fake, _ = await buddy_with_transcript(a)
        a.capture(0, 1, slot=0, body=WEIGHTS)
        offer = await off(fake.offered)
        assert offer.compare
        a.capture(0, 2, slot=0, body=WEIGHTS, announce=False)
        assert await off(fake.take, offer) is dedup.framing.Outcome.TORN
        fake.say(No("torn"))
        await off(fake.close)


@in_loop
async def test_chunks_that_were_not_asked_for_in_the_end_have_not_been_missed():
    async with cluster("a") as (a,):
        fake, token = await buddy_with_transcript(a)
        for version in range(5):
            a.capture(0, version)
            offer = await off(fake.offered)
            assert offer.compare, "nobody has looked for them yet"
            fake.say_held((version, offer.token), transcript=token)
        await off(fake.close)


# --- what a peer may say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", [b"\x00\x00\x01\x01" + bytes(20 * 257), b"\x00\x00\x00\x01" + b"\x00\x00\x00\x09" + bytes(16)]
)
def test_a_block_that_cannot_be_is_refused(said):
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(ChunkLookup([])) as search:
        sender = threading.Thread(target=theirs.sendall, args=(said,))
        sender.start()
        with pytest.raises(ProtocolError), memoryview(bytearray(HEADER_BYTES + 100)) as view:
            search.answer(ours, view)
        sender.join()


@in_loop
async def test_everything_that_was_opened_to_look_is_closed():
    async with cluster("a") as (a,):
        a.capture(0, 1, body=WEIGHTS)
        before = len(descriptors())
        with closing(ChunkLookup([lambda: find(a.replicator._shared, Rank(0), 1), lambda: None])) as search:
            with memoryview(bytearray(HEADER_BYTES + len(WEIGHTS))) as view:
                assert search._find(chunk(0, len(view)), b"no digest of it.", view) is False
            assert len(descriptors()) == before + 1
        assert len(descriptors()) == before
