"""Ranks that share a parity: what it costs, when it counts, what it can compute, and what it refuses to."""

import contextlib
import os
import socket
from unittest.mock import ANY

import pytest
from played_owner import Owner, take_transcript
from vault_kit import KIB, Node, cluster, content, in_loop, off

from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.vault.transfer import chunks, retention
from deadpool_run.vault.transfer.chunks import CHUNK_BYTES
from deadpool_run.vault.transfer.headers import Go, HeldVersions

GROUP = (Rank(0), Rank(1), Rank(2))
BIG = 5 * CHUNK_BYTES


@contextlib.asynccontextmanager
async def grouped(**options):
    """Three nodes with a rank each, a fourth with their parity, and a fifth."""
    async with cluster("a", "b", "c", "parity", "new", **options) as nodes:
        *owners, holder, new = nodes
        holder.replicator.keep(GROUP, [GROUP])
        for rank, owner in enumerate(owners):
            owner.complete_transcript(rank, f"of {rank}".encode())
            owner.replicator.set_buddies({Rank(rank): (holder.peer,)}, [GROUP])
        yield owners, holder, new


def body(rank, version):
    """Of another size for each rank."""
    return content(rank, version, nbytes=BIG + rank * 3 * KIB)


def capture(owners, *versions):
    for version in versions:
        for rank, owner in enumerate(owners):
            owner.capture(rank, version, body=body(rank, version))


async def until_safe(owners, *versions):
    for rank, owner in enumerate(owners):
        await owner.until_safe(rank, *versions)


@contextlib.asynccontextmanager
async def protected():
    """Such nodes, of which each rank's version 7 is in the parity."""
    async with grouped() as (owners, holder, new):
        capture(owners, 7)
        await until_safe(owners, 7)
        yield owners, holder, new


@in_loop
async def test_any_one_of_the_ranks_is_computed_on_another_node():
    async with protected() as (_, holder, new):
        for rank in GROUP:
            assert await new.seat(rank, holder.peer) is None
            assert await new.fetch(rank, 7, holder.peer) is None
            assert new.body(rank, 7) == body(rank, 7)
            assert new.transcript(rank) == f"of {rank}".encode()


@in_loop
async def test_a_rank_is_computed_on_the_node_with_the_parity():
    async with protected() as (__, holder, _):
        assert await holder.seat(1) is None
        assert holder.replicator.versions(Rank(1)) == (7,), "a new leader may ask while the replacement rehearses"
        assert await holder.compute(1, 7) is None
        assert holder.body(1, 7) == body(1, 7)
        assert await holder.compute(1, 7) is None, "it is there already"


@in_loop
async def test_nothing_is_safe_before_the_last_rank_of_the_group_is():
    async with grouped() as (owners, holder, _):
        capture(owners[:2], 7)
        for rank in (0, 1):
            await owners[rank].until(lambda rank=rank: owners[rank].told.get(rank) == ((), True, 0))
        assert holder.replicator.versions(Rank(0)) == ()
        owners[2].capture(2, 7, body=body(2, 7))
        await until_safe(owners, 7)
        assert holder.replicator.versions(Rank(0)) == (7,)


@in_loop
async def test_two_parities_take_the_memory_of_two_snapshots_however_many_ranks_share_them():
    async with grouped() as (owners, holder, _):
        capture(owners, 1)
        await until_safe(owners, 1)
        for version in (2, 3, 4, 5):
            capture(owners, version)
            await until_safe(owners, version - 1, version)
        largest = BIG + 2 * 3 * KIB
        assert holder.vault.status_page.copies_taken < 2.6 * largest, "three copies of each rank would take nine"


@in_loop
async def test_a_version_that_a_rank_passed_over_is_given_up():
    async with grouped() as (owners, _, __):
        capture(owners, 1)
        await until_safe(owners, 1)
        capture(owners[:2], 2)
        owners[2].capture(2, 3, body=body(2, 3))
        for rank in (0, 1):  # their slots with version 2 are free, because it will never be whole
            slot = owners[rank].vault.status_page.rank_entries[rank].slots.index(2)
            owners[rank].capture(rank, 3, slot=slot, body=body(rank, 3))
        await until_safe(owners, 1, 3)


@in_loop
async def test_a_replaced_rank_that_is_ahead_does_not_keep_the_others_from_the_version_they_all_have():
    async with grouped() as (owners, holder, _):
        for rank, owner in enumerate(owners):
            owner.replicator.set_buddies({})
            owner.committed(8)
            for version in (9, 10) if rank == 2 else (8, 9):  # a replacement has no version before that of the repair
                owner.capture(rank, version, body=body(rank, version))
        owners[2].replicator.set_buddies({Rank(2): (holder.peer,)}, [GROUP])
        await owners[2].until(lambda: owners[2].told.get(2) == ((), True, 0))
        for rank in (0, 1):
            owners[rank].replicator.set_buddies({Rank(rank): (holder.peer,)}, [GROUP])
        for rank, owner in enumerate(owners):
            await owner.until(lambda owner=owner, rank=rank: 9 in owner.told.get(rank, ((),))[0])


@in_loop
async def test_two_lost_ranks_of_a_group_are_not_invented():
    async with protected() as (owners, holder, new):
        await owners[2].close()
        assert await new.seat(0, holder.peer) is None
        failure = await new.fetch(0, 7, holder.peer)
        assert "snapshot 7 of rank 2, which shares the parity, did not come from c" in failure
        assert new.vault.held(Rank(0)) == ()


@in_loop
async def test_a_rank_is_computed_from_the_parity_of_its_present_group():
    async with grouped() as (owners, holder, new):
        capture(owners, 7)
        await until_safe(owners, 7)
        present = (Rank(1), Rank(2))
        holder.replicator.keep(GROUP, [present])
        for rank in present:
            owners[rank].replicator.set_buddies({rank: (holder.peer,)}, [present])
        for rank in present:
            await owners[rank].until_safe(rank, 7)
        await owners[0].close()
        await owners[1].close()
        assert await new.seat(1, holder.peer) is None
        assert await new.fetch(1, 7, holder.peer) is None, "the parity of all three lacks two of them"
        assert new.body(1, 7) == body(1, 7)


@in_loop
async def test_an_owner_that_has_another_snapshot_of_the_version_is_not_used():
    async with protected() as (owners, holder, new):
        slot = owners[1].vault.status_page.rank_entries[1].slots.index(7)
        owners[1].capture(1, 7, slot=slot, body=body(1, 8), announce=False)
        assert await new.seat(0, holder.peer) is None
        assert "it has another snapshot of this version" in await new.fetch(0, 7, holder.peer)


@in_loop
async def test_a_delivery_that_breaks_is_continued_and_no_chunk_is_added_twice(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * KIB)
    async with cluster("played", "b", "parity", "new") as (played, other, holder, new):
        group = (Rank(0), Rank(1))
        holder.replicator.keep(group, [group])
        first = Owner(holder)
        first.write(7)
        put = {"group": group, "home": played.peer}
        assert await off(lambda: first.put(7, **put)) == Go()
        await off(lambda: first.send_blocks(2))
        first.sock.shutdown(socket.SHUT_WR)
        assert await off(first.sock.recv, 1) == b"", "the node has read all, and hangs up"
        again = Owner(holder)
        again.bytes, again.token = first.bytes, first.token
        other.complete_transcript(1)
        other.capture(1, 7, body=body(1, 7))
        other.replicator.set_buddies({Rank(1): (holder.peer,)}, [group])
        await off(take_transcript, again)
        again.lacking = 0
        assert await off(lambda: again.put_all(7, **put)) == HeldVersions([(7, first.token)], ANY)
        assert again.lacking == again.digests().chunks - 2 * chunks.BLOCK_CHUNKS
        played.capture(0, 7, body=content(0, 7))
        first.close()
        again.close()
        await other.until_safe(1, 7)
        slot = played.vault.descriptors(Rank(0))["slot0"]
        os.pwrite(slot, first.bytes, 0)  # with the token of what was delivered
        assert await new.seat(1, holder.peer) is None
        assert await new.fetch(1, 7, holder.peer) is None
        assert new.body(1, 7) == body(1, 7)


@pytest.mark.parametrize("at", [100, 4096 + CHUNK_BYTES + 5])
@in_loop
async def test_a_parity_that_was_damaged_in_memory_is_found(at):
    async with protected() as (_, holder, new):
        parity = holder.replicator._shared.replicas.parities.open(Rank(0), 7)
        (byte,) = os.pread(parity._memory, 1, at)
        os.pwrite(parity._memory, bytes([byte ^ 1]), at)
        holder.replicator._shared.replicas.parities.shut(parity)
        assert await new.seat(0, holder.peer) is None
        assert "computed from a parity, is damaged" in await new.fetch(0, 7, holder.peer)
        assert new.vault.held(Rank(0)) == ()


@in_loop
async def test_what_is_not_announced_as_the_nodes_group_is_refused():
    """Owner and holder are told of a new group one after the other: until both know it, nothing counts."""
    async with protected() as (owners, holder, _):
        others = (Rank(0), Rank(1))
        for rank in others:
            owners[rank].replicator.set_buddies({rank: (holder.peer,)}, [others])
            await owners[rank].until(lambda rank=rank: owners[rank].told.get(rank, ((7,),))[0] == ())
        holder.replicator.keep(GROUP, [others])
        await until_safe(owners[:2], 7)


def replaced(owners, version, committed):
    """Have the owners make a version next to the committed one, which the first one, a replacement, does not hold."""
    for rank, owner in enumerate(owners):
        fds, entry = owner.vault.descriptors(Rank(rank)), owner.vault.status_page.rank_entries[rank]
        slot = entry.slots.index(committed)
        if rank == 0:
            entry.set_slot(slot, EMPTY)
            segments.mark_empty(fds[f"slot{slot}"])
        owner.capture(rank, version, slot=1 - slot, body=body(rank, version))


@pytest.mark.parametrize("committed", [1, 2])
@in_loop
async def test_with_room_for_two_parities_the_one_of_a_roll_back_is_taken(committed):
    async with grouped() as (owners, holder, _):
        capture(owners, 1)
        await until_safe(owners, 1)
        capture(owners, 2)
        await until_safe(owners, 1, 2)
        holder.committed(committed)
        for node in (holder, *owners):
            node.replicator.discard_above(1, Version(3))
        page = holder.vault.status_page
        page.memory_limit = page.taken
        replaced(owners, 3, committed)
        await owners[0].until(lambda: owners[0].told[0] == ((3,), True, 1))
        assert holder.replicator.versions(Rank(0)) == (committed, 3)


@in_loop
async def test_with_room_for_one_parity_the_committed_one_goes_after_a_while(monkeypatch):
    monkeypatch.setattr(retention, "_PATIENCE_S", 0.0)
    async with grouped() as (owners, holder, _):
        capture(owners, 1)
        await until_safe(owners, 1)
        holder.committed(1)
        for node in (holder, *owners):
            node.replicator.discard_above(1, Version(3))
        page = holder.vault.status_page
        page.memory_limit = page.taken
        replaced(owners, 3, 1)
        await owners[0].until(lambda: owners[0].told[0] == ((3,), True, 1))
        assert holder.replicator.versions(Rank(0)) == (3,)


@in_loop
async def test_without_memory_for_a_parity_the_owner_hears_of_it():
    nodes = [Node(name) for name in ("a", "b")]
    holder = Node("parity", memory_limit=BIG)
    group = (Rank(0), Rank(1))
    try:
        holder.replicator.keep(group, [group])
        for rank, owner in enumerate(nodes):
            owner.complete_transcript(rank)
            owner.capture(rank, 1, body=content(rank, 1, nbytes=2 * BIG))
            owner.replicator.set_buddies({Rank(rank): (holder.peer,)}, [group])
        await nodes[0].until(lambda: nodes[0].refusals)
        assert nodes[0].refusals == [(0, "parity", True)]
    finally:
        for node in (*nodes, holder):
            await node.close()
