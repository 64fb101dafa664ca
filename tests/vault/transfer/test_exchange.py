"""Chunks that a buddy has are found there. Chunks that it only seems to have are sent."""

import os
from dataclasses import dataclass

import pytest
from kit.processes import descriptors
from vault_kit import cluster, content, digests_of, in_loop

from deadpool_run.ids import Rank
from deadpool_run.vault import segments
from deadpool_run.vault.segments import HEADER_BYTES
from deadpool_run.vault.transfer.catalog import Source
from deadpool_run.vault.transfer.chunks import CHUNK_BYTES, DIGEST_BYTES, split

WEIGHTS = content(7, 7, nbytes=20 * CHUNK_BYTES)
"""Bytes that more than one rank has."""
SMALL = 2 * CHUNK_BYTES


@dataclass
class Offer:
    version: int
    nbytes: int
    rank: int = 0
    token: bytes = bytes(16)


def sent_by(node):
    return node.replicator.traffic().sent_bytes


# --- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 40 * CHUNK_BYTES, 40 * CHUNK_BYTES + 5])
def test_the_chunks_are_the_header_and_all_that_follows_in_order(more):
    digests = digests_of(Offer(1, HEADER_BYTES + more))
    chunks = [chunk for number in range(digests.blocks) for chunk in digests.block(number)]
    assert chunks[0] == (0, HEADER_BYTES)
    assert [begin for begin, _ in chunks[1:]] == [end for _, end in chunks[:-1]]
    assert chunks[-1][1] == HEADER_BYTES + more
    assert len(chunks) == digests.chunks == 1 + -(-more // CHUNK_BYTES)
    assert all(end - begin == CHUNK_BYTES for begin, end in chunks[1:-1])
    assert digests_of(Offer(1, 100)).block(0) == [(0, 100)]


def test_digests_are_of_content_and_secret_and_roots_of_what_it_is_too():
    body = content(0, 0, nbytes=HEADER_BYTES + 3 * CHUNK_BYTES)
    with memoryview(body) as view:
        one, same, other = (digests_of(Offer(version, len(body))) for version in (1, 1, 2))
        keyed = digests_of(Offer(1, len(body)), b"another secret")
        found = [digests.of_block(0, view) for digests in (one, same, other, keyed)]
    assert len(found[0]) == 4 * DIGEST_BYTES
    assert found[0] == found[1] == found[2] != found[3]
    assert not set(split(found[0])) & set(split(found[3]))
    assert one.root(0, 1) == same.root(0, 1)
    assert len({one.root(0, 1), other.root(0, 1), keyed.root(0, 1), one.root(0, 2), one.root(1, 2)}) == 5


# --- between nodes ---------------------------------------------------------------------------------------------------


@in_loop
async def test_what_a_rank_of_the_buddy_has_at_the_same_version_is_not_sent():
    async with cluster("a", "b") as (a, b):
        for version in (3, 4):
            b.capture(1, version, body=WEIGHTS + b"rank 1, its own")
            a.capture(0, version, body=WEIGHTS + b"rank 0, also its own, and longer")
        a.complete_transcript(0)
        a.copies_to(b)
        await a.until(lambda: a.told[0][0] == (4,))
        assert b.copy_of(0, 4) == WEIGHTS + b"rank 0, also its own, and longer"
        assert sent_by(a) < SMALL
        assert a.replicator.traffic().spared_bytes >= len(WEIGHTS) - CHUNK_BYTES
        assert a.replicator.traffic().spared_bytes + sent_by(a) < 2 * len(WEIGHTS)


@in_loop
async def test_a_rank_of_the_buddy_that_is_late_is_waited_for():
    async with cluster("a", "b") as (a, b):
        b.capture(1, 3, body=WEIGHTS)
        a.complete_transcript(0)
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
        a.complete_transcript(0)
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
        a.complete_transcript(0)
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
            a.complete_transcript(rank)
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
        a.complete_transcript(0)
        a.copies_to(b)
        for version in range(5):
            b.capture(1, version, body=content(1, version))
            a.capture(0, version)
            await a.until(lambda version=version: 0 in a.told and version in a.told[0][0])
            assert b.copy_of(0, version) == content(0, version)
        assert a.replicator.traffic().spared_bytes == 0


@in_loop
async def test_a_byte_that_differs_is_sent():
    async with cluster("a", "b") as (a, b):
        for at in (0, len(WEIGHTS) // 2, len(WEIGHTS) - 1):
            other = bytearray(WEIGHTS)
            other[at] ^= 1
            b.capture(1, at, body=bytes(other))
            a.capture(0, at, body=WEIGHTS)
            a.complete_transcript(0)
            a.copies_to(b)
            await a.until(lambda at=at: 0 in a.told and at in a.told[0][0])
            assert b.copy_of(0, at) == WEIGHTS
        assert sent_by(a) < 8 * CHUNK_BYTES


@in_loop
async def test_a_replacement_gets_what_was_never_sent():
    async with cluster("a", "b", "c") as (a, b, c):
        b.capture(1, 4, body=WEIGHTS)
        a.capture(0, 4, body=WEIGHTS)
        a.complete_transcript(0)
        a.copies_to(b)
        await a.until_safe(0, 4)
        await a.close()
        b.capture(1, 5, body=WEIGHTS[::-1])
        b.capture(1, 6, body=WEIGHTS[::-1])
        assert await c.seat(0, b.peer) is None
        assert await c.fetch(0, 4, b.peer) is None
        assert c.body(0, 4) == WEIGHTS


@pytest.mark.parametrize("written", ["begun", "complete"])
@in_loop
async def test_a_slot_of_the_buddy_that_is_written_while_its_chunks_are_copied_is_not_believed(monkeypatch, written):
    async with cluster("a", "b") as (a, b):
        hashed = Source.places

        def hashed_and_overwritten(source, block):
            places = hashed(source, block)
            if written == "complete":
                b.capture(1, 5, slot=0, body=WEIGHTS[::-1], announce=False)
            else:
                fd = b.vault.descriptors(Rank(1))["slot0"]
                segments.mark_busy(fd)
                os.pwrite(fd, bytes(len(WEIGHTS)), HEADER_BYTES)
            return places

        monkeypatch.setattr(Source, "places", hashed_and_overwritten)
        b.capture(1, 3, slot=0, body=WEIGHTS)
        a.capture(0, 3, body=WEIGHTS)
        a.complete_transcript(0)
        a.copies_to(b)
        await a.until_safe(0, 3)
        assert b.copy_of(0, 3) == WEIGHTS
        assert sent_by(a) > len(WEIGHTS), "no chunk of the slot was used"


@in_loop
async def test_a_copy_of_memory_that_changes_without_a_new_token_is_refused_when_it_is_needed():
    async with cluster("a", "b", "c") as (a, b, c):
        b.replicator.keep({Rank(0), Rank(2)})
        for rank in (0, 2):
            a.capture(rank, 3, body=WEIGHTS)
            a.complete_transcript(rank)
        b.capture(1, 3, body=WEIGHTS)
        a.replicator.set_buddies({Rank(0): (b.peer,)})
        await a.until_safe(0, 3)
        assert sent_by(a) < SMALL
        b.replicator.keep({Rank(2)})  # else the copy of rank 0 has everything, too
        os.pwrite(b.vault.descriptors(Rank(1))["slot0"], bytes(100), HEADER_BYTES + 5 * CHUNK_BYTES + 7)
        before = sent_by(a)
        a.replicator.set_buddies({Rank(2): (b.peer,)})
        await a.until_safe(2, 3)
        assert sent_by(a) - before < SMALL, "it was copied at the buddy"
        await a.close()
        assert await c.seat(2, b.peer) is None
        assert "damaged" in await c.fetch(2, 3, b.peer)


@in_loop
async def test_what_is_at_another_place_at_the_buddy_is_found_too():
    async with cluster("a", "b") as (a, b):
        b.capture(1, 3, body=content(1, 3, nbytes=3 * CHUNK_BYTES) + WEIGHTS)
        a.capture(0, 3, body=WEIGHTS)
        a.complete_transcript(0)
        a.copies_to(b)
        await a.until_safe(0, 3)
        assert b.copy_of(0, 3) == WEIGHTS
        # A chunk is found once the same block of the other rank was hashed: the last three of each block come later.
        assert sent_by(a) < 8 * CHUNK_BYTES


@in_loop
async def test_what_a_rank_of_its_node_has_is_not_fetched_for_a_replacement():
    async with cluster("a", "b") as (a, b):
        for version in (3, 4):
            a.capture(0, version, body=WEIGHTS + content(0, version))
            b.capture(1, version, body=WEIGHTS + content(1, version))
        a.complete_transcript(0)
        assert await b.seat(0, a.peer) is None
        assert await b.fetch(0, 3, a.peer) is None
        assert b.body(0, 3) == WEIGHTS + content(0, 3)
        before = sent_by(a)
        assert before > len(WEIGHTS), "nothing was hashed at its node, and a repair does not wait for that"
        b.copies_to(a, rank=1)
        await b.until(lambda: 1 in b.told and 4 in b.told[1][0])
        assert await b.fetch(0, 4, a.peer) is None
        assert b.body(0, 4) == WEIGHTS + content(0, 4)
        assert sent_by(a) - before < SMALL


@pytest.mark.parametrize("secret", [b"what another job's agents know", b""])
@in_loop
async def test_nodes_with_other_secrets_believe_nothing_of_each_other(secret):
    async with cluster("a") as (a,), cluster("b", secret=secret) as (b,):
        b.replicator.keep({Rank(0)})
        a.holds(4)
        failure = await b.seat(0, a.peer)
        assert "the peer sent a damaged segment" in failure
        b.vault.put(Rank(0), (), segments.create_memory("transcript"))
        failure = await b.fetch(0, 4, a.peer)
        assert "the peer sent a damaged segment" in failure
        assert b.vault.captured(Rank(0)) == ()


@in_loop
async def test_everything_that_was_opened_to_look_is_closed():
    before = descriptors()
    async with cluster("a", "b") as (a, b):
        for version in range(4):
            b.capture(1, version, body=WEIGHTS)
            a.capture(0, version, body=WEIGHTS)
            a.complete_transcript(0)
            a.copies_to(b)
            await a.until(lambda version=version: 0 in a.told and version in a.told[0][0])
    assert descriptors() == before, "also what nobody refers to any more"
