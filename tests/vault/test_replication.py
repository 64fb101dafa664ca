"""Copies between nodes, as their agents see it."""

from vault_kit import cluster, content, in_loop

from deadpool_run.ids import Rank, Version


@in_loop
async def test_a_snapshot_and_its_transcript_arrive():
    async with cluster("a", "b") as (a, b):
        b.replicator.keep({Rank(0)})
        a.capture(0, 0)
        a.seal(0)
        a.replicator.set_buddies({Rank(0): (b.peer,)})
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
async def test_a_newcomer_elsewhere_gets_the_transcript_and_then_the_version():
    async with cluster("a", "b", "c") as (a, b, c):
        b.replicator.keep({Rank(0)})
        a.capture(0, 4)
        a.capture(0, 5)
        a.seal(0, b"what it received")
        a.replicator.set_buddies({Rank(0): (b.peer,)})
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
async def test_a_buddy_becomes_the_home():
    async with cluster("a", "b", "c") as (a, b, c):
        b.replicator.keep({Rank(0)})
        a.capture(0, 4)
        a.seal(0)
        a.replicator.set_buddies({Rank(0): (b.peer,)})
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
        a.capture(0, 0)
        a.seal(0)
        assert a.told == {}
        a.replicator.set_buddies({Rank(0): ()})
        assert a.told == {0: ((0,), True, 0)}
        a.capture(0, 1)
        assert a.told == {0: ((0, 1), True, 0)}
        a.replicator.discard_above(1, Version(0))
        assert a.told == {0: ((0,), True, 1)}
