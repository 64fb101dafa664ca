"""Copies between nodes that lack memory, and the memory that copies take."""

import asyncio
import logging
import mmap
import os
import threading
from pathlib import Path

import pytest
from played_owner import pair
from vault_kit import LIMIT_S, cluster, content, in_loop, off

from deadpool_run.ids import Rank, Version
from deadpool_run.vault.transfer import receiver, retention, sender
from deadpool_run.vault.transfer.headers import No
from deadpool_run.view import memory_plan


@in_loop
async def test_a_copy_is_taken_only_while_there_is_memory_for_it(caplog, monkeypatch):
    refused = threading.Event()
    monkeypatch.setattr(
        receiver._LOG, "filter", lambda record: record.levelno < logging.WARNING or refused.set() or True
    )
    async with cluster("a", "b") as (a, b):
        entry = b.vault.status_page.rank_entries[3]
        a.holds(0)
        a.copies_to(b)
        await a.until_safe(0, 0)
        entry.growing = 1 << 60  # a worker of b's is about to take all that there is
        a.capture(0, 1)
        a.capture(0, 2)
        assert await asyncio.to_thread(refused.wait, LIMIT_S)
        assert b.replicator.traffic().without_memory == 1
        assert b.replicator.versions(Rank(0)) == (0,)
        assert b.copy_of(0, 0) == content(0, 0), "a copy is not given up for one that does not come"
        entry.growing = 0
        a.capture(0, 3)  # the owner also tries again by itself, ever more rarely
        await a.until_safe(0, 3)
        assert b.replicator.traffic().without_memory == 0
        assert b.vault.status_page.growing == 0
        assert len([record for record in caplog.records if "no memory for a copy of rank 0" in record.message]) == 1


@in_loop
async def test_a_buddy_that_has_no_memory_for_a_while_is_reported_until_it_takes_a_copy(monkeypatch):
    monkeypatch.setattr(sender, "_REFUSED_S", 0.1)
    async with cluster("a", "b") as (a, b):
        entry = b.vault.status_page.rank_entries[3]
        a.holds(0)
        a.copies_to(b)
        await a.until_safe(0, 0)
        assert a.refusals == []
        entry.growing = 1 << 60
        a.capture(0, 1)
        await a.until(lambda: a.refusals)
        assert a.refusals == [(0, "b", True)]
        a.replicator.report_all()
        assert a.refusals == [(0, "b", True)] * 2, "a new leader does not know"
        a.replicator.set_buddies({Rank(0): ()})
        a.replicator.set_buddies({Rank(0): (b.peer,)})
        await a.until(lambda: a.refusals[2:])
        assert a.refusals[2:] == [(0, "b", True)], "it is tried again, and has no memory still"
        entry.growing = 0
        await a.until_safe(0, 0, 1)
        await a.until(lambda: a.refusals[3:])
        assert a.refusals[3:] == [(0, "b", False)]


@in_loop
async def test_copies_take_no_more_than_the_limit_and_what_is_dropped_does_not_count():
    async with cluster("a", "b", memory_limit=1 << 20) as (a, b):
        page = b.vault.status_page
        a.capture(0, 0, body=bytes(400_000))
        a.complete_transcript(0)
        a.copies_to(b)
        await a.until_safe(0, 0)
        assert 400_000 < page.taken < 450_000
        a.capture(0, 1, body=bytes(400_000))
        await a.until_safe(0, 0, 1)
        assert 800_000 < page.taken <= 1 << 20
        a.capture(0, 2, body=bytes(400_000))  # the oldest goes first
        await a.until_safe(0, 1, 2)
        assert 800_000 < page.taken <= 1 << 20
        assert page.growing == 0
        assert b.replicator.traffic().without_memory == 0
        b.replicator.keep(())
        assert page.taken == 0


@in_loop
async def test_a_copy_takes_as_many_segments_as_the_plan_says():
    async with cluster("a", "b") as (a, b):
        a.capture(0, 0, body=bytes(4_000_000))
        a.complete_transcript(0)
        a.copies_to(b)
        await a.until_safe(0, 0)
        for version in range(1, 6):
            a.capture(0, version, body=bytes(4_000_000))
            await a.until_safe(0, version - 1, version)
        assert b.vault.status_page.taken // 4_000_000 == memory_plan.SEGMENTS_PER_COPY


@in_loop
async def test_the_memory_of_a_rank_counts_once_wherever_it_moves():
    async with cluster("a", "b") as (a, b):
        a.holds(0)
        a.copies_to(b)
        await a.until_safe(0, 0)
        copied = b.vault.status_page.taken
        assert copied > len(content(0, 0))
        assert await b.seat(0) is None
        assert b.vault.status_page.taken == copied - 2 * mmap.PAGESIZE, "a rank's transcript is small, and not counted"
        a.replicator.keep({Rank(0)})
        a.replicator.left(Rank(0))
        assert a.vault.status_page.taken > len(content(0, 0))
        a.replicator.keep(())
        assert a.vault.status_page.taken == 0


@pytest.mark.parametrize("how", ["it left", "a new generation", "the end"])
@in_loop
async def test_the_mapping_of_a_slot_ends_with_what_it_is_for(how):
    async with cluster("a", "b") as (a, b):
        a.holds(4)
        slots = {os.fstat(fd).st_ino for name, fd in a.vault.descriptors(Rank(0)).items() if name.startswith("slot")}
        a.copies_to(b)
        await a.until_safe(0, 4)
        assert slots & mapped(), "it is kept for the next snapshot"
        if how == "it left":
            a.replicator.left(Rank(0))
        elif how == "a new generation":
            a.vault.renew()
            a.replicator.renew(1)
        else:
            await a.close()
        for link in a.replicator._ending:
            await off(link.thread.join)
        assert not slots & mapped()


def mapped() -> set[int]:
    """Return the inodes of all files that this process has mapped."""
    return {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()}


@in_loop
async def test_without_memory_a_copy_that_its_owner_has_dropped_makes_room_for_the_next():
    async with cluster("a", "b") as (a, b):
        bodies = [bytes([version]) * 200_000 for version in range(4)]
        a.capture(0, 0, body=bodies[0])
        a.complete_transcript(0)
        a.copies_to(b)
        await a.until_safe(0, 0)
        a.capture(0, 1, body=bodies[1])
        await a.until_safe(0, 0, 1)
        b.vault.status_page.rank_entries[3].growing = 1 << 60
        a.capture(0, 2, body=bodies[2])
        await a.until_safe(0, 1, 2)
        a.capture(0, 3, body=bodies[3])
        await a.until_safe(0, 2, 3)
        assert b.replicator.traffic().without_memory == 0


@pytest.mark.parametrize("holds", [4, 5, None])
@in_loop
async def test_with_room_for_two_copies_the_one_of_a_roll_back_is_taken(holds, monkeypatch):
    """The committed version stays, unless the owner holds the other one, which may be about to be committed."""
    async with pair() as (node, owner):
        node.committed(4)
        await owner.gives(4)
        identities = {4: (4, owner.token)}
        owner.write(5)
        identities[5] = (5, owner.token)
        await off(lambda: owner.put_all(5, held=list(identities.values())))
        node.replicator.discard_above(1, Version(6))
        node.vault.status_page.rank_entries[3].growing = 1 << 60
        owner.write(6)
        held = [*([identities[holds]] if holds else ()), (6, owner.token)]
        if holds == 5:
            for _ in range(2):
                assert isinstance(await off(lambda: owner.put(6, timeline=1, held=held)), No)
            assert node.replicator.versions(Rank(0)) == (4, 5), "another node may have memory"
            monkeypatch.setattr(retention, "_PATIENCE_S", 0.0)
        await off(lambda: owner.put_all(6, timeline=1, held=held))
        assert node.replicator.versions(Rank(0)) == (5 if holds == 5 else 4, 6)


@in_loop
async def test_with_room_for_one_copy_the_committed_one_goes_after_a_while(monkeypatch):
    async with pair() as (node, owner):
        node.committed(4)
        await owner.gives(4)
        four = (4, owner.token)
        node.replicator.discard_above(1, Version(6))
        node.vault.status_page.rank_entries[3].growing = 1 << 60
        owner.write(6)
        for _ in range(2):
            assert isinstance(await off(lambda: owner.put(6, timeline=1)), No)
        assert node.replicator.versions(Rank(0)) == (4,), "another node may have memory"
        monkeypatch.setattr(retention, "_PATIENCE_S", 0.0)
        assert isinstance(await off(lambda: owner.put(6, timeline=1, held=[four, (6, owner.token)])), No)
        await off(lambda: owner.put_all(6, timeline=1))
        assert node.replicator.versions(Rank(0)) == (6,)
