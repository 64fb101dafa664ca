"""The state of a replacement's rank is fetched beside its rehearsal, and published by the order to resume."""

from functools import partial

import pytest
from vault_kit import KIB, cluster, content, in_loop, off

from deadpool_run.ids import Rank, Version
from deadpool_run.vault.status_page import BUSY, EMPTY

_BIG = partial(content, nbytes=8 << 20)


def resume_from(timeline, version, *nodes):
    for node in nodes:
        node.replicator.discard_above(timeline, Version(version))


async def begins_to_fetch_ahead(node, source):
    """Have the node fetch version 5, which is large, before the order to resume from it."""
    source.capture(0, 5, body=_BIG(0, 5))
    source.complete_transcript(0)
    resume_from(1, 5, source)
    assert await node.seat(0, source.peer) is None
    resume_from(1, 5, node)


def entries(node):
    return node.vault.status_page.rank_entries[0]


@pytest.mark.parametrize("known", ["before the seat", "beside the transcript", "after the seat"])
@in_loop
async def test_the_resume_version_is_fetched_before_the_order_which_publishes_it(known):
    async with cluster("a", "b") as (a, b):
        a.holds(4, 5)
        resume_from(1, 5, a)
        if known == "before the seat":
            resume_from(1, 5, b)
            assert await b.seat(0, a.peer, resume=Version(5)) is None
        elif known == "beside the transcript":
            seated = b.loop.create_future()
            b.replicator.seat(Rank(0), a.peer, seated.set_result)
            resume_from(1, 5, b)
            assert await seated is None
        else:
            assert await b.seat(0, a.peer) is None
            resume_from(1, 5, b)
        await b.until_fetched(0)
        await a.close()
        assert b.vault.captured(Rank(0)) == (), "its worker still rehearses, and may empty the slot"
        assert await b.fetch(0, 5, a.peer) is None
        assert b.vault.captured(Rank(0)) == (5,)
        assert b.body(0, 5) == content(0, 5)
        assert b.replicator.traffic().fetched_bytes > 200 * KIB


@in_loop
async def test_an_order_while_the_version_is_being_fetched_does_not_fetch_it_again():
    async with cluster("a", "b", bandwidth=32 << 20) as (a, b):
        await begins_to_fetch_ahead(b, a)
        sent = a.replicator.traffic().sent_bytes
        assert await b.fetch(0, 5, a.peer) is None
        assert b.body(0, 5) == _BIG(0, 5)
        assert a.replicator.traffic().sent_bytes - sent < 1.5 * (8 << 20)


@in_loop
async def test_what_cannot_be_fetched_ahead_is_fetched_from_the_node_of_the_order():
    async with cluster("a", "b", "c") as (a, b, c):
        a.holds(4)
        b.holds(4, 5)
        resume_from(1, 5, a, b)
        assert await c.seat(0, a.peer) is None
        resume_from(1, 5, c)
        await c.until_fetched(0)
        assert await c.fetch(0, 5, b.peer) is None
        assert c.body(0, 5) == content(0, 5)


@pytest.mark.parametrize("waits", [False, True])
@in_loop
async def test_after_another_loss_the_version_of_the_last_roll_back_is_fetched(waits):
    async with cluster("a", "b", bandwidth=32 << 20) as (a, b):
        a.capture(0, 4, body=_BIG(0, 4))
        await begins_to_fetch_ahead(b, a)
        if waits:
            await b.until_fetched(0)
        resume_from(2, 4, a, b)
        await b.until_fetched(0)
        await a.close()
        assert await b.fetch(0, 4, a.peer) is None
        assert b.vault.captured(Rank(0)) == (4,)
        assert b.body(0, 4) == _BIG(0, 4)


@in_loop
async def test_a_version_that_was_fetched_for_an_earlier_roll_back_is_not_published_for_a_later_one():
    async with cluster("a", "b") as (a, b):
        a.holds(4, 5)
        resume_from(1, 5, a)
        assert await b.seat(0, a.peer) is None
        resume_from(1, 5, b)
        await b.until_fetched(0)
        a.capture(0, 5, token=1, slot=entries(a).slots.index(5))
        resume_from(2, 5, a, b)
        assert await b.fetch(0, 5, a.peer) is None
        assert b.body(0, 5) == content(0, 5, 1)


@pytest.mark.parametrize("how", ["left", "new generation"])
@in_loop
async def test_nothing_is_fetched_for_a_rank_that_is_to_live_elsewhere(how):
    async with cluster("a", "b") as (a, b):
        a.holds(5)
        assert await b.seat(0, a.peer) is None
        if how == "left":
            b.replicator.left(Rank(0))
        else:
            b.vault.renew()
            b.replicator.renew(0)
        resume_from(1, 5, a, b)
        assert b.replicator.local_ranks() == set()


@in_loop
async def test_a_cancelled_fetch_leaves_no_slot_busy():
    async with cluster("a", "b", bandwidth=1 << 20) as (a, b):
        await begins_to_fetch_ahead(b, a)
        (task,) = b.replicator._fetches.tasks()[-1:]
        while BUSY not in entries(b).slots:
            await off(task.thread.join, 0.001)
        assert await b.seat(0) is None
        await off(task.thread.join)
        assert entries(b).slots == (EMPTY, EMPTY)


@in_loop
async def test_a_version_that_is_here_is_not_fetched_ahead():
    async with cluster("a", "b") as (a, b):
        a.holds(4)
        a.copies_to(b)
        await a.until_safe(0, 4)
        sent = a.replicator.traffic().sent_bytes
        a.replicator.left(Rank(0))
        resume_from(1, 4, a)
        assert await b.seat(0, a.peer) is None
        resume_from(1, 4, b)
        assert b.replicator._fetches.tasks() == []
        assert await b.compute(0, 4) is None
        assert b.body(0, 4) == content(0, 4)
        assert a.replicator.traffic().sent_bytes == sent
