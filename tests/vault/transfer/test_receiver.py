"""A vault's answers to a peer that the test plays, and its refusals."""

import asyncio
import contextlib
import os
import struct

import pytest
from kit import processes
from played_owner import pair, take_transcript
from vault_kit import KIB, LIMIT_S, connect, content, in_loop, off

from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.transfer import exchange, framing
from deadpool_run.vault.transfer.chunks import DIGEST_BYTES
from deadpool_run.vault.transfer.framing import Outcome
from deadpool_run.vault.transfer.headers import Go, HeldVersions, No
from deadpool_run.wire.typed import to_json


@in_loop
async def test_a_whole_copy_counts():
    async with pair() as (node, owner):
        owner.write(5)
        answer = await off(owner.put_all, 5)
        assert answer == HeldVersions([(5, owner.token)], None)
        assert node.replicator.versions(Rank(0)) == (), "without a transcript nobody can rehearse"
        answer = await off(take_transcript, owner)
        assert answer.transcript is not None
        assert node.replicator.versions(Rank(0)) == (5,)
        assert node.copy_of(0, 5) == content(0, 5)
        assert isinstance(await off(owner.put, 5), HeldVersions), "the same content is not sent twice"


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("at", [-1, segments.HEADER_BYTES + 77, 3, 20])
@in_loop
async def test_a_flipped_byte_is_found_and_the_copy_before_stays(at):
    async with pair() as (node, owner):
        await owner.gives(5)
        held = [(5, owner.token)]
        owner.write(6)
        assert await off(owner.put, 6, held=[*held, (6, owner.token)]) == Go()
        before = flipped(owner.bytes, at % len(owner.bytes))
        assert await off(lambda: owner.send(sent=before)) == No("damaged")
        assert node.replicator.versions(Rank(0)) == (5,)
        assert node.copy_of(0, 5) == content(0, 5)
        assert isinstance(await off(owner.put_all, 6, held=[*held, (6, owner.token)]), HeldVersions)
        assert node.copy_of(0, 6) == content(0, 6)


@in_loop
async def test_who_has_another_secret_can_give_nothing():
    async with pair() as (node, owner):
        owner.write(5)
        assert await off(owner.put, 5) == Go()
        assert await off(lambda: owner.send(secret=b"another one")) == No("damaged")
        assert node.replicator._shared.replicas.open(Rank(0), Version(5)) is None


@in_loop
async def test_a_forged_chunk_of_the_right_length_is_refused():
    """A listener knows genuine digests and root digests, and cannot make another."""
    async with pair() as (node, owner):
        owner.write(5)
        assert await off(owner.put, 5) == Go()
        begin, end = segments.HEADER_BYTES, segments.HEADER_BYTES + 100 * KIB
        forged = owner.bytes[:begin] + os.urandom(end - begin) + owner.bytes[end:]
        assert await off(lambda: owner.send(sent=forged)) == No("damaged")
        assert node.replicator._shared.replicas.open(Rank(0), Version(5)) is None


@in_loop
async def test_genuine_chunks_are_of_no_use_in_another_place():
    """Digests fit the chunks, and the header is the right one; but the root digest is of what was sent before."""
    async with pair() as (node, owner):
        await owner.gives(5)
        with memoryview(owner.bytes) as view:
            owner.asked = owner.offer(5)
            before = owner.digests()
            before.of_block(0, view)
        owner.write(6)
        assert await off(owner.put, 6) == Go()
        assert await off(lambda: owner.send(root=before.root(0, 1))) == No("damaged")
        assert node.replicator.versions(Rank(0)) == (5,)


@pytest.mark.parametrize("lie", ["header", "manifest", "version", "token", "size"])
@in_loop
async def test_what_came_whole_must_also_be_what_was_announced(lie):
    async with pair() as (node, owner):
        owner.write(5)
        changes = {}
        match lie:
            case "header":
                owner.bytes = flipped(owner.bytes, 20)
            case "manifest":
                owner.bytes = flipped(owner.bytes, len(owner.bytes) - 9)
            case "version":
                changes = {"version": 6}
            case "token":
                changes = {"token": bytes(16)}
            case "size":
                owner.bytes += b"more"
        assert await off(lambda: owner.ask(**(owner.offer(5) | changes))) == Go()
        assert await off(owner.send) == No("damaged")
        assert node.replicator._shared.replicas.open(Rank(0), Version(5)) is None


@in_loop
async def test_a_torn_copy_is_thrown_away():
    async with pair() as (_node, owner):
        owner.write(5)
        assert await off(owner.put, 5) == Go()
        assert await off(lambda: owner.send(status=Outcome.TORN)) == No("torn")
        assert await off(owner.put, 5) == Go(), "it is not here"
        assert await off(lambda: owner.send(0, Outcome.TORN)) == No("torn")


@in_loop
async def test_an_owner_that_dies_midway_leaves_what_was_there():
    async with pair() as (node, owner):
        await owner.gives(5)
        owner.write(6)
        assert await off(owner.put, 6) == Go()
        owner.say(exchange._DIGESTS, 2 * DIGEST_BYTES, bytes(DIGEST_BYTES))
        (served,) = node.replicator._served
        owner.sock.close()
        await off(served.thread.join, LIMIT_S)
        assert node.replicator.versions(Rank(0)) == (5,)
        assert node.copy_of(0, 5) == content(0, 5)


@in_loop
async def test_only_what_the_owner_holds_is_kept_in_three_memories():
    async with pair() as (node, owner):
        tokens = {}
        for version in range(6):
            owner.write(version)
            tokens[version] = owner.token
            held = [(each, tokens[each]) for each in (version - 1, version) if each >= 0]
            answer = await off(lambda version=version, held=held: owner.put_all(version, held=held))
            assert answer.held == held
            if version == 0:
                await off(take_transcript, owner)
        assert node.replicator.versions(Rank(0)) == (4, 5)
        files = {os.fstat(fd).st_ino for fd, of in processes.descriptors().items() if "deadpool-0-copy" in of}
        assert len(files) <= 3 + 1, "two, a spare, and the transcript"


@in_loop
async def test_ranks_that_are_not_kept_are_refused_and_those_no_longer_kept_are_dropped():
    async with pair() as (node, owner):
        owner.write(5)
        assert (await off(lambda: owner.put(5, rank=1))).why == "this node does not keep copies of the rank"
        await off(owner.put_all, 5)
        await off(take_transcript, owner)
        node.replicator.keep({Rank(1)})
        assert node.replicator.versions(Rank(0)) == ()
        assert (await off(owner.put, 5)).why == "this node does not keep copies of the rank"
        node.replicator.keep({Rank(0)})
        assert await off(owner.put, 5) == Go()


@in_loop
async def test_a_rank_that_lives_here_takes_no_copies():
    async with pair() as (node, owner):
        node.capture(0, 5)
        owner.write(6)
        assert (await off(owner.put, 6)).why == "the rank lives on this node"


@in_loop
async def test_a_copy_that_is_on_its_way_when_the_rank_begins_to_live_here_is_refused():
    async with pair() as (node, owner):
        await owner.gives(5)
        held = [(5, owner.token)]
        owner.write(6)
        assert await off(lambda: owner.put(6, held=[*held, (6, owner.token)])) == Go()
        assert await node.seat(0) is None
        assert await off(owner.send) == No("the rank lives on this node")
        assert node.replicator.versions(Rank(0)) == (5,)


@in_loop
async def test_what_an_older_timeline_sends_is_refused_also_when_it_is_on_its_way():
    async with pair() as (node, owner):
        await owner.gives(5)
        before = [(5, owner.token)]
        owner.write(6)
        held = [*before, (6, owner.token)]
        await off(lambda: owner.put_all(6, held=held))
        assert node.replicator.versions(Rank(0)) == (5, 6)
        owner.write(7)
        assert await off(lambda: owner.put(7, held=[*held[1:], (7, owner.token)])) == Go()
        node.replicator.discard_above(1, Version(5))
        assert node.replicator.versions(Rank(0)) == (5,)
        assert (await off(owner.send)).why.startswith("timeline 0 is older")
        assert (await off(owner.put, 6)).why.startswith("timeline 0 is older")
        assert node.replicator.versions(Rank(0)) == (5,)
        owner.write(6, token=1)
        held = [*before, (6, owner.token)]
        assert (await off(lambda: owner.put_all(6, timeline=1, held=held))).held == held
        node.replicator.discard_above(2, Version(6))
        assert node.copy_of(0, 6) == content(0, 6, 1)


@in_loop
async def test_a_newer_timeline_may_be_heard_of_from_its_owner_first():
    async with pair() as (node, owner):
        await owner.gives(5)
        owner.write(6, token=1)
        await off(lambda: owner.put_all(6, timeline=3))
        assert (await off(owner.put, 5)).why.startswith("timeline 0 is older")
        node.replicator.discard_above(3, Version(5))
        assert node.replicator.versions(Rank(0)) == (6,), "it was made in the life that begins"
        node.replicator.renew(4)
        assert node.replicator.versions(Rank(0)) == ()


@in_loop
async def test_a_version_that_was_made_again_is_another_content():
    """The owner knows of the roll-back, and this node does not yet."""
    async with pair() as (node, owner):
        await owner.gives(5)
        five = (5, owner.token)
        owner.write(6)
        await off(lambda: owner.put_all(6, held=[five, (6, owner.token)]))
        first = owner.token
        owner.write(6, token=1)
        held = [five, (6, owner.token)]
        assert owner.token != first
        answer = await off(lambda: owner.ask(**(owner.offer(5, 1, held) | {"token": five[1]})))
        assert answer.held == [five], "the 6 that is here is not the owner's"
        assert node.replicator.versions(Rank(0)) == (5,)
        await off(lambda: owner.put_all(6, timeline=1, held=held))
        owner.write(6, token=2)
        assert (await off(lambda: owner.put_all(6, timeline=1))).held == [(6, owner.token)]
        assert node.copy_of(0, 6) == content(0, 6, 2)


@in_loop
async def test_a_committed_version_is_kept_until_that_of_the_roll_back_is_committed():
    """A replacement holds only the version that it resumed from; another loss may bring all ranks back to the committed one."""
    async with pair() as (node, owner):
        await owner.gives(3)
        tokens = {}
        for version in (4, 5):
            owner.write(version)
            tokens[version] = owner.token
            await off(lambda version=version: owner.put_all(version, held=list(tokens.items())))
        node.committed(4)
        node.replicator.discard_above(1, Version(6))
        owner.write(6)
        six = (6, owner.token)
        answer = await off(lambda: owner.ask(**(owner.offer(5, 1, [six]) | {"token": tokens[5]})))
        assert answer.held == list(tokens.items()), "the owner has only 6, and it is not here yet"
        await off(lambda: owner.put_all(6, timeline=1))
        assert node.replicator.versions(Rank(0)) == (4, 5, 6)
        node.committed(6)
        owner.write(7)
        await off(lambda: owner.put_all(7, timeline=1, held=[six, (7, owner.token)]))
        assert node.replicator.versions(Rank(0)) == (6, 7)


async def rolled_back(node, owner, *versions):
    """Have copies of these versions, then a roll back to 6, which the owner makes; return the identity of each."""
    await owner.gives(3)
    identities = {}
    for version in versions:
        owner.write(version)
        identities[version] = (version, owner.token)
        await off(lambda version=version: owner.put_all(version, held=list(identities.values())))
    node.replicator.discard_above(1, Version(6))
    owner.write(6)
    return identities | {6: (6, owner.token)}


@in_loop
async def test_an_abandoned_version_is_not_kept_for_another_loss():
    async with pair() as (node, owner):
        node.committed(4, (5,))
        identities = await rolled_back(node, owner, 4, 5)
        await off(lambda: owner.put_all(6, timeline=1, held=[identities[6]]))
        assert node.replicator.versions(Rank(0)) == (4, 6)


@in_loop
async def test_a_new_leader_does_not_make_a_node_forget_what_was_committed():
    """It begins with no commit, and lists even the last one as abandoned."""
    async with pair() as (node, owner):
        node.committed(4)
        node.committed(None, (4,))
        identities = await rolled_back(node, owner, 3, 4, 5)
        await off(lambda: owner.put_all(6, timeline=1, held=[identities[6]]))
        assert node.replicator.versions(Rank(0)) == (4, 5, 6), "3 is older"
        owner.write(7)
        await off(lambda: owner.put_all(7, timeline=1, held=[identities[6], (7, owner.token)]))
        assert node.replicator.versions(Rank(0)) == (4, 6, 7), "no more than an answer can list"
        node.replicator.discard_above(2, Version(4))
        owner.write(4)
        await off(lambda: owner.put_all(4, timeline=2))
        assert node.replicator.versions(Rank(0)) == (4,), "nothing is kept for a loss below the commit"


@in_loop
async def test_a_generation_forgets_everything_before_it():
    async with pair() as (node, owner):
        await owner.gives(5)
        node.replicator.renew(1)
        assert node.replicator.versions(Rank(0)) == ()
        assert (await off(owner.put, 5)).why.startswith("timeline 0 is older")


@in_loop
async def test_who_asks_too_early_is_answered_when_this_node_knows_as_much():
    async with pair() as (node, owner):
        owner.write(5)
        await off(owner.put_all, 5)
        asking = asyncio.create_task(off(lambda: owner.ask(type="Get", rank=0, version=5, timeline=1, part=0, of=1)))
        assert not (await asyncio.wait({asking}, timeout=0.3))[0], "it was given what may be void"
        node.replicator.discard_above(1, Version(4))
        assert isinstance(await asking, No), "5 is void there"


def frame(body):
    return struct.pack(">I", len(body)) + body


BASE = {"type": "Put", "rank": 0, "version": 5, "token": bytes(16), "nbytes": 9000, "timeline": 0, "held": []}
BASE |= {"of": 1, "delivery": bytes(16)}
GARBAGE = {
    "a long frame": struct.pack(">I", 1 << 31),
    "no json": frame(b"\xff\xfe{"),
    "no object": frame(b"[1]"),
    "deep json": frame(b"[" * 60000),
    "no verb": frame(b"{}"),
    "another verb": frame(to_json({"type": "Delete"})),
} | {
    f"{name} {value!r}"[:40]: frame(to_json(BASE | {name: value}))
    for name, values in {
        "rank": (-1, 4, 1 << 70, "0", None, True, 0.0),
        "version": (-2, "5", 1 << 70, []),
        "token": ("", "zz", bytes(17), 5, None),
        "nbytes": (0, -1, 1 << 62, None, "9000"),
        "timeline": (-1, None, "0"),
        "of": (0, 17, None, "1"),
        "delivery": (None, "", bytes(15)),
        "held": (None, [5], [[5]], [[5, bytes(1)]], [[5, bytes(16)]] * 4, {}),
    }.items()
    for value in values
}


@in_loop
async def test_garbage_ends_its_connection_and_nothing_else():
    async with pair() as (node, owner):
        for name, data in GARBAGE.items():
            stranger = connect(*node.listener.getsockname())
            try:
                stranger.send(data)
                await off(lambda stranger=stranger: expect_end(stranger.sock))
            except AssertionError as error:
                raise AssertionError(f"{name} was not refused: {error}") from None
            finally:
                stranger.close()
        owner.write(5)
        assert isinstance(await off(owner.put_all, 5), HeldVersions)


def expect_end(sock):
    with contextlib.suppress(ConnectionResetError):
        data = sock.recv(100)
        assert data == b"", data


@pytest.mark.parametrize("cut", [1, 3, 20])
@in_loop
async def test_a_frame_cut_short_is_nothing(cut):
    async with pair() as (node, owner):
        stranger = connect(*node.listener.getsockname())
        stranger.sock.sendall(frame(to_json(BASE))[:cut])
        stranger.sock.shutdown(framing.socket.SHUT_WR)
        await off(lambda: expect_end(stranger.sock))
        stranger.close()
        owner.write(5)
        assert isinstance(await off(owner.put_all, 5), HeldVersions)


@pytest.mark.parametrize("length", [0, 1, DIGEST_BYTES, 3 * DIGEST_BYTES, (1 << 32) - 1])
@pytest.mark.parametrize("kind", [exchange._DIGESTS, exchange._CHUNKS, exchange._END + 1])
@in_loop
async def test_a_message_that_is_not_due_ends_the_connection(kind, length):
    async with pair() as (node, owner):
        owner.write(5)
        assert await off(owner.put, 5) == Go()
        owner.say(kind, length)
        await off(lambda: expect_end(owner.sock))
        assert node.replicator._shared.replicas.open(Rank(0), Version(5)) is None


@pytest.mark.parametrize("length", [0, 1, 200 * KIB, (1 << 32) - 1])
@in_loop
async def test_chunks_of_another_length_end_the_connection(length):
    async with pair() as (node, owner):
        owner.write(5)
        assert await off(owner.put, 5) == Go()
        owner.say(exchange._DIGESTS, body=bytes(2 * DIGEST_BYTES))
        assert await off(framing.receive_tagged, owner.connection, 2) == b"\1\1"
        owner.say(exchange._CHUNKS, length)
        await off(lambda: expect_end(owner.sock))
        assert node.replicator._shared.replicas.open(Rank(0), Version(5)) is None


@in_loop
async def test_a_segment_that_ends_early_ends_the_connection():
    async with pair() as (node, owner):
        owner.write(5)
        assert await off(owner.put, 5) == Go()
        owner.say(exchange._END, Outcome.WHOLE, owner.digests().root(0, 1))
        await off(lambda: expect_end(owner.sock))
        assert node.replicator._shared.replicas.open(Rank(0), Version(5)) is None


@in_loop
async def test_a_peer_that_stops_in_the_middle_of_a_message_is_given_up(monkeypatch):
    monkeypatch.setattr(framing, "TIMEOUT_S", 0.3)
    async with pair() as (_node, owner):
        owner.sock.sendall(struct.pack(">I", 100) + b"{")
        await off(lambda: expect_end(owner.sock))


@in_loop
async def test_a_peer_that_is_silent_between_messages_is_not(monkeypatch):
    monkeypatch.setattr(framing, "TIMEOUT_S", 0.05)
    asked = []
    honest = framing.receive_frame

    def receive_frame(connection, *, idle=lambda: False):
        return honest(connection, idle=lambda: idle() and not asked.append(True))

    monkeypatch.setattr(framing, "receive_frame", receive_frame)
    async with pair() as (_node, owner):
        while len(asked) < 3:
            await off(owner.sock.gettimeout)
        owner.write(5)
        assert (await off(owner.put, 5)) == Go()
