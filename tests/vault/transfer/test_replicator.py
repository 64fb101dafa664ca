"""Copies between nodes, as their agents see it."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
from vault_kit import FakeBuddy, cluster, connect, content, in_loop, off

from deadpool_run.agent.node.node import LocalNode
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.status_page import BUSY, EMPTY
from deadpool_run.wire.peers import Buddies


@in_loop
async def test_a_snapshot_and_its_transcript_arrive():
    async with cluster("a", "b") as (a, b):
        a.holds(0)
        a.copies_to(b)
        await a.until_safe(0, 0)
        assert b.replicator.versions(Rank(0)) == (0,)
        assert b.copy_of(0, 0) == content(0, 0)
        a.capture(0, 1)
        await a.until_safe(0, 0, 1)
        a.capture(0, 2)
        await a.until_safe(0, 1, 2)
        assert b.replicator.versions(Rank(0)) == (1, 2)
        for version in (1, 2):
            assert b.copy_of(0, version) == content(0, version)


@in_loop
async def test_a_replacement_elsewhere_gets_the_transcript_and_then_the_version():
    async with cluster("a", "b", "c") as (a, b, c):
        a.holds(4, 5, transcript=b"what it received")
        a.copies_to(b)
        await a.until_safe(0, 5)
        await a.close()
        assert await c.seat(0, b.peer) is None
        assert c.transcript(0) == b"what it received"
        before = c.vault.descriptors(Rank(0))
        assert await c.fetch(0, 5, b.peer) is None
        assert c.vault.descriptors(Rank(0)) == before, "the worker has these already"
        assert c.vault.captured(Rank(0)) == (5,)
        assert c.body(0, 5) == content(0, 5)
        c.replicator.set_buddies({Rank(0): (b.peer,)})
        await c.until_safe(0, 5)


@in_loop
async def test_a_transcript_that_is_not_as_it_was_received_is_not_given_to_a_replacement():
    """torch unpickles the objects in it: here and where it is fetched, it must be what its owner's agent sent."""
    async with cluster("a", "b", "c") as (a, b, c):
        a.holds(4)
        a.copies_to(b)
        await a.until_safe(0, 4)
        copy, fd = b.replicator._shared.replicas.open(Rank(0), None)
        segments.write_blob(fd, b"a transcribed")  # whole, with a digest that fits, but without the key
        b.replicator._shared.replicas.shut(copy, fd)
        assert "damaged" in await c.seat(0, b.peer)
        assert await b.seat(0) == "this node holds no snapshot and transcript of rank 0"
        assert b.vault.open_transcript(Rank(0)) is None
        assert b.replicator.versions(Rank(0)) == ()


@in_loop
async def test_a_buddy_becomes_the_owner():
    async with cluster("a", "b", "c") as (a, b, c):
        a.holds(4)
        a.copies_to(b)
        await a.until_safe(0, 4)
        a.capture(0, 5)
        await a.until_safe(0, 4, 5)
        await a.close()
        assert await b.seat(0) is None
        assert b.transcript(0) == b"a transcript"
        assert b.vault.captured(Rank(0)) == (4, 5)
        assert b.body(0, 4) == content(0, 4)
        assert b.body(0, 5) == content(0, 5)
        assert b.replicator.versions(Rank(0)) == (4, 5)
        c.replicator.keep({Rank(0)})
        b.replicator.set_buddies({Rank(0): (c.peer,)})
        await b.until_safe(0, 5)
        b.capture(0, 6)
        await b.until_safe(0, 5, 6)
        assert c.copy_of(0, 6) == content(0, 6)


@in_loop
async def test_nothing_is_safe_of_a_rank_whose_buddies_are_not_known():
    async with cluster("a") as (a,):
        a.holds(0)
        assert a.told == {}
        a.replicator.set_buddies({Rank(0): ()})
        assert a.told == {0: ((0,), True, 0)}
        a.capture(0, 1)
        assert a.told == {0: ((0, 1), True, 0)}
        a.replicator.discard_above(1, Version(0))
        assert a.told == {0: ((0,), True, 1)}


@in_loop
async def test_what_a_rank_leaves_behind_can_be_had_until_it_is_no_longer_kept():
    async with cluster("a", "b") as (a, b):
        a.holds(4, 5)
        a.replicator.left(Rank(0))
        assert not a.vault.lives_here(Rank(0))
        assert a.vault.status_page.rank_entries[0].held == ()
        assert a.replicator.versions(Rank(0)) == (4, 5)
        assert await b.seat(0, a.peer) is None
        a.replicator.discard_above(1, Version(4))
        b.replicator.discard_above(1, Version(4))
        assert a.replicator.versions(Rank(0)) == (4,)
        assert "holds no snapshot 5" in await b.fetch(0, 5, a.peer)
        assert await b.fetch(0, 4, a.peer) is None
        assert b.body(0, 4) == content(0, 4)
        a.replicator.keep(())
        assert a.replicator.versions(Rank(0)) == ()


@in_loop
async def test_a_rank_that_comes_back_does_not_find_what_it_left():
    async with cluster("a", "b") as (a, b):
        a.holds(4, transcript=b"old")
        b.holds(9, transcript=b"new")
        a.replicator.left(Rank(0))
        assert await a.seat(0, b.peer) is None
        assert a.vault.captured(Rank(0)) == ()
        assert a.transcript(0) == b"new"
        assert a.replicator.versions(Rank(0)) == ()


@in_loop
async def test_what_a_replacement_left_that_never_came_to_live_here_does_not_hide_the_copies():
    """It was ended before its repair was over, and another node has its rank; this one holds copies of it."""
    async with cluster("a", "b") as (a, b):
        a.holds(4)
        assert await b.seat(0, a.peer) is None
        LocalNode.set_buddies(SimpleNamespace(copies=b.replicator), Buddies({}, (Rank(0),)))
        a.replicator.set_buddies({Rank(0): (b.peer,)})
        await a.until_safe(0, 4)
        await a.close()
        assert b.replicator.versions(Rank(0)) == (4,)
        assert await b.seat(0) is None
        assert b.vault.captured(Rank(0)) == (4,)


@in_loop
async def test_a_dead_owners_node_seats_its_next_owner_with_what_lies_there():
    async with cluster("a") as (a,):
        a.holds(4, 5)
        before = a.vault.descriptors(Rank(0))
        a.vault.vacate(Rank(0))
        assert await a.seat(0) is None
        assert a.vault.descriptors(Rank(0)) == before
        assert a.vault.captured(Rank(0)) == (4, 5)


@in_loop
async def test_nothing_to_begin_with_is_said():
    async with cluster("a", "b") as (a, b):
        assert "no snapshot and transcript of rank 0" in await a.seat(0)
        assert "holds no transcript of rank 0" in await a.seat(0, b.peer)
        a.capture(0, 0)
        assert "no snapshot and transcript of rank 0" in await a.seat(0), "without a transcript"


@in_loop
async def test_a_source_that_is_gone_is_said_and_slots_stay_empty():
    async with cluster("a", "b", "c") as (a, b, c):
        a.holds(4)
        assert await b.seat(0, a.peer) is None
        await a.close()
        assert "a (127.0.0.1" in await b.fetch(0, 4, a.peer)
        assert b.vault.captured(Rank(0)) == ()
        assert "a (127.0.0.1" in await c.seat(0, a.peer)


async def copied_twice(a, b):
    """Have a's rank 0 send two versions to b."""
    a.complete_transcript(0)
    a.copies_to(b)
    a.capture(0, 4)
    await a.until_safe(0, 4)
    a.capture(0, 5)
    await a.until_safe(0, 4, 5)


async def copied_twice_and_ahead(a, b):
    """Have b hold two versions of a's rank 0, and a alone a newer one."""
    await copied_twice(a, b)
    a.replicator.set_buddies({Rank(0): ()})
    a.capture(0, 6)


@in_loop
async def test_a_replacements_node_keeps_its_copies_until_it_has_what_the_source_holds():
    """The rank's worker died on its node, whose memory is newer; then that node is lost as well."""
    async with cluster("a", "b") as (a, b):
        await copied_twice_and_ahead(a, b)
        assert await b.seat(0, a.peer) is None
        assert b.transcript(0) == b"a transcript"
        assert "holds no snapshot 9" in await b.fetch(0, 9, a.peer)
        await a.close()
        assert "a (127.0.0.1" in await b.fetch(0, 6, a.peer)
        assert b.replicator.versions(Rank(0)) == (4, 5)
        assert await b.seat(0) is None
        assert b.vault.captured(Rank(0)) == (4, 5)
        assert b.body(0, 5) == content(0, 5)


@in_loop
async def test_what_a_replacements_node_held_gives_way_to_what_the_source_holds():
    async with cluster("a", "b") as (a, b):
        await copied_twice_and_ahead(a, b)
        assert await b.seat(0, a.peer) is None
        before = b.vault.descriptors(Rank(0))
        assert await b.fetch(0, 6, a.peer) is None
        assert b.vault.descriptors(Rank(0)) == before
        assert b.vault.captured(Rank(0)) == (6,)
        assert sorted(b.vault.status_page.rank_entries[0].slots) == [-1, 6]
        assert b.body(0, 6) == content(0, 6)


@in_loop
async def test_a_fetch_replaces_all_that_was_there_and_is_sent_on():
    async with cluster("a", "b", "c") as (a, b, c):
        a.holds(4)
        b.capture(0, 4, token=9)
        b.capture(0, 5, token=9)
        b.complete_transcript(0)
        b.copies_to(c)
        await b.until_safe(0, 5)
        assert await b.fetch(0, 4, a.peer) is None
        assert b.vault.status_page.rank_entries[0].slots == (4, -1)
        assert b.body(0, 4) == content(0, 4)
        for node in (b, c):
            node.replicator.discard_above(1, Version(4))
        await b.until_safe(0, 4, timeline=1)
        assert c.copy_of(0, 4) == content(0, 4)


@in_loop
async def test_a_fetch_leaves_no_other_content_of_its_version():
    """After the order to discard newer ones, the version that the ranks resume from is one that a loss may need."""
    async with cluster("a", "b") as (a, b):
        a.holds(4)
        b.capture(0, 4, token=9)
        b.complete_transcript(0)
        for node in (a, b):
            node.replicator.discard_above(1, Version(4))
        assert await b.fetch(0, 4, a.peer) is None
        assert sorted(b.vault.status_page.rank_entries[0].slots) == [-1, 4]
        assert b.body(0, 4) == content(0, 4)


@in_loop
async def test_a_fetch_leaves_a_committed_version_that_another_loss_may_need():
    async with cluster("a", "b") as (a, b):
        await copied_twice_and_ahead(a, b)
        assert await b.seat(0, a.peer) is None
        b.committed(5)
        b.replicator.discard_above(1, Version(6))
        a.replicator.discard_above(1, Version(6))
        assert await b.fetch(0, 6, a.peer) is None
        assert b.vault.captured(Rank(0)) == (5, 6)
        assert b.body(0, 5) == content(0, 5)
        assert b.body(0, 6) == content(0, 6)


@in_loop
async def test_a_fetch_takes_the_slot_of_the_newer_of_two_versions_that_another_loss_may_need():
    async with cluster("a", "b") as (a, b):
        await copied_twice_and_ahead(a, b)
        assert await b.seat(0) is None
        assert b.vault.captured(Rank(0)) == (4, 5)
        b.committed(4)
        for node in (a, b):
            node.replicator.discard_above(1, Version(6))
        assert await b.fetch(0, 6, a.peer) is None
        assert b.vault.captured(Rank(0)) == (4, 6)
        assert b.body(0, 4) == content(0, 4)


@in_loop
async def test_a_buddy_with_three_versions_becomes_the_owner_of_each():
    async with cluster("a", "b") as (a, b):
        await copied_twice(a, b)
        b.committed(4)
        for node in (a, b):
            node.replicator.discard_above(1, Version(5))
        a.capture(0, 6)
        await a.until_safe(0, 4, 5, 6, timeline=1)
        await a.close()
        assert b.replicator.versions(Rank(0)) == (4, 5, 6)
        assert await b.seat(0) is None
        assert b.vault.captured(Rank(0)) == (5, 6)
        assert b.replicator.versions(Rank(0)) == (4, 5, 6)
        done = b.loop.create_future()
        b.replicator.discard_above(2, Version(4))
        b.replicator.compute(Rank(0), Version(4), done.set_result)
        assert await done is None
        assert b.vault.captured(Rank(0)) == (4,)
        assert b.body(0, 4) == content(0, 4)


@in_loop
async def test_of_two_orders_for_a_rank_the_later_counts():
    async with cluster("a", "b") as (a, b):
        a.holds(4, 5)
        assert await b.seat(0, a.peer) is None
        first, second = b.loop.create_future(), b.loop.create_future()
        b.replicator.fetch(Rank(0), Version(4), a.peer, first.set_result)
        b.replicator.fetch(Rank(0), Version(5), a.peer, second.set_result)
        assert await second is None
        await first
        assert b.vault.captured(Rank(0)) == (5,)
        assert b.body(0, 5) == content(0, 5)


def until(true):
    """Wait until something is true that tells nobody."""
    while not true():
        time.sleep(0.001)


@pytest.mark.parametrize("seats_first", [False, True])
@in_loop
async def test_a_fetch_does_not_write_to_a_slot_after_an_order_to_use_what_is_here(seats_first):
    """The source was cut off, and the job resumed from an older version. The replacement's worker then uses the other slot."""
    body = partial(content, nbytes=4 << 20)
    async with cluster("a", "b", bandwidth=2 << 20) as (a, b):
        a.capture(0, 10, body=body(0, 10))
        a.complete_transcript(0)
        a.copies_to(b)
        await a.until_safe(0, 10)
        a.capture(0, 11, body=body(0, 11), announce=False)
        a.replicator.set_buddies({})
        assert await b.seat(0) is None
        fetched = b.loop.create_future()
        b.replicator.fetch(Rank(0), Version(11), a.peer, fetched.set_result)
        entry = b.vault.status_page.rank_entries[0]
        await off(until, lambda: BUSY in entry.slots)
        b.replicator.discard_above(6, Version(10))
        if seats_first:
            assert await b.seat(0) is None
        assert await b.compute(0, 10) is None
        assert sorted(entry.slots) == [EMPTY, 10]
        assert await fetched is not None
        b.capture(0, 12, body=body(0, 12), slot=segments.free_slot(entry.slots, 10, ()))
        assert b.body(0, 12) == body(0, 12)


@in_loop
async def test_when_buddies_change_the_new_ones_get_everything():
    async with cluster("a", "b", "c") as (a, b, c):
        a.holds(4, 5)
        a.vault.status_page.publish(Version(4), [])
        a.copies_to(b)
        await a.until_safe(0, 4, 5)
        a.replicator.set_buddies({Rank(0): (b.peer, c.peer)})
        assert a.told[0] == ((), False, 0), "not all have it"
        c.replicator.keep({Rank(0)})
        await a.until_safe(0, 4, 5)
        assert c.copy_of(0, 4) == content(0, 4)
        await b.close()
        a.capture(0, 6, slot=0)
        a.replicator.set_buddies({Rank(0): (c.peer,)})
        await a.until_safe(0, 5, 6)


@in_loop
async def test_after_a_roll_back_nothing_is_sent_twice_and_all_of_it_is_reported():
    async with cluster("a", "b") as (a, b):
        a.vault.status_page.publish(Version(4), [])
        a.holds(4, 5)
        a.copies_to(b)
        await a.until_safe(0, 4, 5)
        sent = a.replicator.traffic().sent_bytes
        for node in (b, a):
            node.replicator.discard_above(7, Version(4))
        assert a.told[0] == ((), False, 7)
        await a.until_safe(0, 4, timeline=7)
        assert a.replicator.traffic().sent_bytes == sent, "the buddy has this content already"
        a.empty_above(0, 4)
        a.capture(0, 5, token=1)
        await a.until_safe(0, 4, 5, timeline=7)
        assert b.copy_of(0, 5) == content(0, 5, 1)


@in_loop
async def test_a_new_generation_begins_from_nothing():
    async with cluster("a", "b") as (a, b):
        a.holds(4)
        a.copies_to(b)
        await a.until_safe(0, 4)
        for node in (a, b):
            node.vault.renew()
            node.replicator.renew(1)
        assert b.replicator.versions(Rank(0)) == ()
        a.capture(0, 0)
        a.replicator.set_buddies({Rank(0): (b.peer,)})
        await a.until_safe(0, 0, transcript=False, timeline=1)
        assert b.replicator.versions(Rank(0)) == ()


@in_loop
async def test_what_was_told_is_told_again_to_who_has_not_heard_it():
    async with cluster("a") as (a,):
        a.capture(0, 4)
        a.replicator.set_buddies({Rank(0): ()})
        a.told.clear()
        a.replicator.report_all()
        assert a.told == {0: ((4,), False, 0)}


@pytest.mark.parametrize("busy", ["serving", "sending", "fetching", "waiting to try again"])
@in_loop
async def test_a_replicator_closes_whatever_it_does(busy):
    """That nothing is left of it is looked at behind every test."""
    async with cluster("a") as (a,):
        a.capture(0, 4, body=bytes(32 << 20))
        a.complete_transcript(0)
        match busy:
            case "serving":
                peer = await off(connect, *a.listener.getsockname())
                peer.sock.sendall(b"\0\0\0")
                await a.until_serving()
            case "sending" | "fetching":
                peer = FakeBuddy()
                if busy == "sending":
                    a.replicator.set_buddies({Rank(0): (peer.peer,)})
                else:
                    a.replicator.fetch(Rank(0), Version(3), peer.peer, lambda _: None)
                await off(peer.accept)
                await off(peer.offered)
            case _:
                peer = FakeBuddy()
                peer.listener.close()
                a.replicator.set_buddies({Rank(0): (peer.peer,)})
        began = a.loop.time()
        await a.close()
        assert a.loop.time() - began < 2
        peer.close()


@pytest.mark.parametrize("first", ["buddy", "owner"])
@in_loop
async def test_a_buddy_keeps_the_version_that_its_owner_is_about_to_fetch(first):
    """The owner was replaced and has only version 6. Its link offers nothing that counts, before its fetch begins."""
    async with cluster("a", "b") as (a, b):
        a.holds(4)
        a.copies_to(b)
        await a.until_safe(0, 4)
        for node in (a, b):
            node.committed(4)
            node.replicator.discard_above(1, Version(6))
        descriptors, entry = a.vault.descriptors(Rank(0)), a.vault.status_page.rank_entries[0]
        slot = entry.slots.index(4)
        entry.set_slot(slot, EMPTY)
        segments.mark_empty(descriptors[f"slot{slot}"])
        a.capture(0, 6, slot=1 - slot)
        await a.until_safe(0, 4, 6, timeline=1)
        assert b.replicator.versions(Rank(0)) == (4, 6)
        for node in (b, a) if first == "buddy" else (a, b):
            node.replicator.discard_above(2, Version(4))
        assert await a.fetch(0, 4, b.peer) is None
        assert a.body(0, 4) == content(0, 4)
        assert b.replicator.versions(Rank(0)) == (4,)
