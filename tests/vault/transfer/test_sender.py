"""An owner's messages in order, as a buddy receives them that the test plays."""

import errno
import os
import socket

import pytest
from vault_kit import KIB, FakeBuddy, Node, digests_of, in_loop, off

from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.status_page import BUSY
from deadpool_run.vault.transfer import exchange, framing, headers, sender
from deadpool_run.vault.transfer.catalog import Source
from deadpool_run.vault.transfer.chunks import DIGEST_BYTES, ChunkDigests, Hasher
from deadpool_run.vault.transfer.framing import Outcome
from deadpool_run.vault.transfer.headers import Go, No

LARGE = os.urandom(32 * KIB * KIB)
"""More than the sockets between two ends take in."""


class Pair:
    """An owner of rank 0, whose only buddy is played."""

    def __init__(self, **options):
        self.owner, self.buddy = Node("a", **options), FakeBuddy()

    async def __aenter__(self):
        return self.owner, self.buddy

    async def __aexit__(self, *_):
        self.buddy.close()
        await self.owner.close()


def peek(buddy, nbytes):
    """Wait until so much has come, and leave it there."""
    assert buddy.connection.sock.recv_into(bytearray(nbytes), nbytes, socket.MSG_PEEK | socket.MSG_WAITALL) == nbytes


def lacks_everything(buddy, offer):
    """Have the offered segment sent, and answer in advance that every chunk is missing."""
    buddy.say(Go())
    digests = digests_of(offer)
    for number in range(digests.blocks):
        buddy.connection.send(b"\1" * len(digests.block(number)))


async def begin(owner, buddy):
    """Connect; return what is offered first."""
    owner.replicator.set_buddies({Rank(0): (buddy.peer,)})
    await off(buddy.accept)
    return await off(buddy.offered)


def test_a_segment_that_cannot_be_mapped_is_closed():
    fd = os.open("/dev/null", os.O_RDONLY)
    digests = ChunkDigests(Hasher(bytes(32)), Rank(0), Version(1), bytes(16), 4 * KIB)
    with pytest.raises(OSError, match="No such device"):
        Source.of_file(fd, digests, lambda: True, lambda: os.close(fd))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@in_loop
async def test_the_transcript_comes_first_and_then_the_newest():
    async with Pair() as (owner, buddy):
        owner.holds(3, 4)
        offer = await begin(owner, buddy)
        assert (offer.rank, offer.version, offer.timeline) == (0, None, 0)
        assert [version for version, _ in offer.held] == [3, 4]
        assert await off(buddy.take, offer) is Outcome.WHOLE
        buddy.say_held(transcript=offer.token)
        offer = await off(buddy.offered)
        assert offer.version == 4
        await owner.until(lambda: owner.told[0] == ((), True, 0))


@in_loop
async def test_a_new_buddy_gets_the_committed_version_first():
    async with Pair() as (owner, buddy):
        owner.vault.status_page.publish(Version(3), [])
        owner.capture(0, 3)
        owner.capture(0, 4)
        offer = await begin(owner, buddy)
        assert offer.version == 3
        await buddy.accepts(offer)
        assert (await off(buddy.offered)).version == 4


@in_loop
async def test_after_a_repair_a_buddy_gets_the_version_of_the_repair_first():
    async with Pair() as (owner, buddy):
        owner.committed(3)
        owner.replicator.discard_above(1, Version(4))
        owner.capture(0, 4)
        owner.capture(0, 5)  # of a replaced rank, which has no version 3: the others cannot capture 5 yet
        offer = await begin(owner, buddy)
        assert offer.version == 4
        await buddy.accepts(offer)
        assert (await off(buddy.offered)).version == 5


@in_loop
async def test_a_waiting_version_is_replaced_by_a_newer_one_and_never_sent():
    async with Pair() as (owner, buddy):
        owner.capture(0, 1)
        first = await begin(owner, buddy)
        owner.capture(0, 2)  # waits
        owner.capture(0, 3)
        assert first.version == 1
        assert await off(buddy.take, first) is Outcome.TORN, "3 was written over it"
        buddy.say(No("torn"))
        second = await off(buddy.offered)
        assert second.version == 3
        await buddy.accepts(second)
        await owner.until(lambda: owner.told[0] == ((3,), False, 0))
        owner.capture(0, 4, slot=owner.vault.status_page.rank_entries[0].slots.index(2))
        assert (await off(buddy.offered)).version == 4


@in_loop
async def test_no_older_version_follows_a_newer_one():
    async with Pair() as (owner, buddy):
        owner.capture(0, 1)
        owner.capture(0, 2)
        offer = await begin(owner, buddy)
        assert offer.version == 2
        await buddy.accepts(offer)
        await owner.until(lambda: owner.told[0] == ((2,), False, 0))
        owner.replicator.captured(Rank(0), Version(1))
        owner.capture(0, 3, slot=0)
        assert (await off(buddy.offered)).version == 3


@in_loop
async def test_a_slot_that_is_overwritten_while_it_is_sent_is_said_to_be_torn():
    async with Pair() as (owner, buddy):
        owner.capture(0, 1, body=LARGE)
        offer = await begin(owner, buddy)
        buddy.say(Go())
        await off(peek, buddy, 1)  # it is on its way
        owner.vault.status_page.rank_entries[0].set_slot(0, BUSY)
        assert await off(buddy.receive, offer) is Outcome.TORN


@in_loop
async def test_the_same_version_written_again_is_another_content():
    """After a roll-back, the same slot holds the same version again, complete: only its header's count tells."""
    async with Pair() as (owner, buddy):
        owner.capture(0, 1, body=LARGE)
        offer = await begin(owner, buddy)
        owner.capture(0, 1, slot=0, body=LARGE[::-1])
        assert await off(buddy.take, offer) is Outcome.TORN
        buddy.say(No("torn"))
        again = await off(buddy.offered)
        assert again.version == 1
        assert again.token != offer.token


@in_loop
async def test_bytes_that_change_after_they_were_hashed_are_found_out():
    """A stray write, of which the slot's header says nothing."""
    async with Pair() as (owner, buddy):
        owner.capture(0, 1, body=LARGE[: 24 * KIB])
        offer = await begin(owner, buddy)
        buddy.say(Go())
        await off(peek, buddy, exchange._HEAD.size + 2 * DIGEST_BYTES)
        os.pwrite(owner.vault.descriptors(Rank(0))["slot0"], b"\0" * 4096, segments.HEADER_BYTES)
        assert await off(buddy.receive, offer) is Outcome.DAMAGED


@in_loop
async def test_what_was_hashed_for_one_buddy_is_not_hashed_for_the_next():
    async with Pair() as (owner, buddy):
        hasher = owner.replicator._shared.hasher
        hashed, chunk = [], hasher.chunk
        hasher.chunk = lambda data: (hashed.append(len(data)), chunk(data))[1]
        owner.capture(0, 1, body=LARGE)
        offer = await begin(owner, buddy)
        assert await off(buddy.take, offer) is Outcome.WHOLE
        assert sum(hashed) == offer.nbytes
        other = FakeBuddy("other")
        owner.replicator.set_buddies({Rank(0): (buddy.peer, other.peer)})
        await off(other.accept)
        assert await off(other.take, await off(other.offered)) is Outcome.WHOLE
        assert sum(hashed) == offer.nbytes
        other.close()


@in_loop
async def test_a_machine_without_descriptors_tries_again_later(monkeypatch):
    """An error of this machine ended the thread, and the rank was never copied again."""
    opened, failures = sender.open_held, [OSError(errno.EMFILE, "too many open files")]

    def open_held(*arguments):
        if failures:
            raise failures.pop()
        return opened(*arguments)

    monkeypatch.setattr(sender, "open_held", open_held)
    async with Pair() as (owner, buddy):
        owner.capture(0, 1)
        offer = await begin(owner, buddy)
        assert (offer.version, failures) == (1, [])
        assert await off(buddy.take, offer) is Outcome.WHOLE


@in_loop
async def test_a_buddy_that_hangs_up_midway_is_tried_again():
    async with Pair() as (owner, buddy):
        owner.capture(0, 1, body=LARGE)
        lacks_everything(buddy, await begin(owner, buddy))
        await off(framing.receive_exactly, buddy.connection.sock, 100 * KIB)
        await off(buddy.accept)
        offer = await off(buddy.offered)
        assert offer.version == 1
        assert await off(buddy.take, offer) is Outcome.WHOLE


@pytest.mark.parametrize(
    "answer",
    [
        {"type": "HeldVersions", "held": "x", "transcript": None},
        {"type": "HeldVersions", "held": [[1, "zz"]], "transcript": None},
        {"type": "HeldVersions", "held": [[-1, bytes(16)]], "transcript": None},
        {"type": "HeldVersions", "held": [[1, bytes(16)]] * 9, "transcript": None},
        {"type": "HeldVersions"},
        {"type": "HeldVersions", "held": [], "transcript": 7},
        {"type": "Put"},
    ],
)
@in_loop
async def test_nonsense_for_an_answer_is_not_believed(answer):
    async with Pair() as (owner, buddy):
        owner.capture(0, 1)
        await begin(owner, buddy)
        headers.send(buddy.connection, answer)
        await off(buddy.accept)  # another connection, on which it is offered again
        assert (await off(buddy.offered)).version == 1
        assert owner.told[0] == ((), False, 0)


@in_loop
async def test_a_buddy_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(framing, "TIMEOUT_S", 0.3)
    async with Pair() as (owner, buddy):
        owner.capture(0, 1)
        await begin(owner, buddy)
        await off(buddy.accept)
        assert (await off(buddy.offered)).version == 1


@in_loop
async def test_a_buddy_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(framing, "TIMEOUT_S", 0.3)
    async with Pair() as (owner, buddy):
        owner.capture(0, 1, body=LARGE)
        lacks_everything(buddy, await begin(owner, buddy))
        await off(buddy.accept)
        assert (await off(buddy.offered)).version == 1


@in_loop
async def test_what_is_sent_is_void_when_a_new_timeline_begins():
    async with Pair() as (owner, buddy):
        owner.capture(0, 1)
        owner.capture(0, 2, body=LARGE)
        offer = await begin(owner, buddy)
        assert (offer.version, offer.timeline) == (2, 0)
        owner.replicator.discard_above(1, Version(1))
        assert await off(buddy.take, offer) is Outcome.TORN
        buddy.say(No("torn"))
        offer = await off(buddy.offered)
        assert (offer.version, offer.timeline) == (1, 1), "2 is of a life that did not happen"
        assert [version for version, _ in offer.held] == [1]
        await buddy.accepts(offer)
        await owner.until(lambda: owner.told[0] == ((1,), False, 1))
        owner.empty_above(0, 1)
        owner.capture(0, 2, token=1)
        offer = await off(buddy.offered)
        assert (offer.version, offer.timeline) == (2, 1)


@in_loop
async def test_an_acknowledgement_of_an_older_timeline_does_not_count():
    async with Pair() as (owner, buddy):
        owner.capture(0, 1)
        offer = await begin(owner, buddy)
        assert await off(buddy.take, offer) is Outcome.WHOLE
        owner.replicator.discard_above(1, Version(1))
        buddy.say_held((1, offer.token))
        offer = await off(buddy.offered)
        assert (offer.version, offer.timeline) == (1, 1)
        assert owner.told[0] == ((), False, 1)


@in_loop
async def test_a_cap_on_bandwidth_holds():
    rate = 16 * KIB * KIB
    async with Pair(bandwidth=rate) as (owner, buddy):
        owner.capture(0, 1, body=LARGE[: 8 * KIB * KIB])
        offer = await begin(owner, buddy)
        began = owner.loop.time()
        assert await off(buddy.take, offer) is Outcome.WHOLE
        took = owner.loop.time() - began
        assert took > (offer.nbytes - exchange.PIECE_BYTES) / rate * 0.9
        assert owner.replicator.traffic().sent_bytes == offer.nbytes


@in_loop
async def test_the_report_has_the_time_of_the_last_copy_and_of_its_hashing():
    rate = 16 * KIB * KIB
    async with Pair(bandwidth=rate) as (owner, buddy):
        owner.capture(0, 1, body=LARGE[: 8 * KIB * KIB])
        offer = await begin(owner, buddy)
        assert owner.replicator.traffic().copied_s == 0.0
        await buddy.accepts(offer)
        await owner.until(lambda: owner.told[0] == ((1,), False, 0))
        traffic = owner.replicator.traffic()
        assert traffic.copied_s > (offer.nbytes - exchange.PIECE_BYTES) / rate * 0.9
        assert 0.0 < traffic.hashed_s < traffic.copied_s
        assert traffic.sent_bytes == offer.nbytes > len(LARGE[: 8 * KIB * KIB])
