"""Nodes without workers: a vault and its replicator each, over real sockets, and slots written as a worker writes them."""

import asyncio
import contextlib
import inspect
import random
import socket
import threading
from collections.abc import Callable

from kit.tagged import tagged

from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.segments import HEADER_BYTES, SegmentState, SlotHeader
from deadpool_run.vault.status_page import BUSY, EMPTY
from deadpool_run.vault.transfer import framing, headers
from deadpool_run.vault.transfer.chunks import ChunkDigests, Hasher
from deadpool_run.vault.transfer.exchange import IncomingCopy
from deadpool_run.vault.transfer.headers import Go, HeldVersions
from deadpool_run.vault.transfer.replicator import Replicator
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.peers import Peer
from deadpool_run.wire.typed import to_json

LIMIT_S = 10.0
KIB = 1 << 10
SECRET = b"what the agents of the job know"


def content(rank, version, token=0, nbytes=200 * KIB):
    """Return the bytes that stand for a rank's tensors."""
    return random.Random(f"{rank} {version} {token}").randbytes(nbytes)


def fill_slot(fd, rank, version, body):
    """Write a complete slot, as a worker does."""
    segments.mark_busy(fd)
    segments.write_all(fd, body, HEADER_BYTES)
    manifest = segments.encode_manifest(
        version=Version(version),
        rank=Rank(rank),
        tensors=to_json(()),
        value_tensors=to_json(()),
        blobs=[(HEADER_BYTES, len(body))],
        values={},
    )
    end = HEADER_BYTES + len(body)
    segments.write_all(fd, manifest, end)
    header = SlotHeader(SegmentState.COMPLETE, version, end, len(manifest), segments.digest_of(manifest))
    segments.write_header(fd, header)


def body_of(fd, version):
    """Return what a slot holds, which must be this version, complete."""
    manifest = segments.read_manifest(fd, Version(version))
    (offset, nbytes), *_ = manifest.blobs
    return segments.read_exactly(fd, nbytes, offset)


class Node:
    """One node: what happens to it, and what was told of it."""

    def __init__(self, name, world_size=4, *, secret=SECRET, bandwidth=None, dial=None, streams=1, memory_limit=0):
        self.name = name
        self.vault = Vault(world_size, memory_limit)
        self.told = {}
        self.refusals = []
        """Per report of a buddy's memory: the rank, the buddy, and whether it refuses copies."""
        self.heard = lambda *_: None
        self._changed = asyncio.Condition()
        self._pulses = set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(NodeId(name), *self.listener.getsockname())
        self.replicator = Replicator(
            self.vault,
            asyncio.get_running_loop(),
            dial or connect,
            self._on_safe,
            self._on_refused,
            here=self.peer,
            secret=secret,
            bandwidth=bandwidth,
            streams=streams,
        )
        self.loop = asyncio.get_running_loop()
        self._waited = threading.Event()
        captures = self.replicator._shared.captures
        wait_for = captures.wait_for
        captures.wait_for = lambda true, timeout_s: (self._waited.set(), wait_for(true, timeout_s))
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        self._open = True

    def capture(self, rank, version, token=0, *, slot=None, body=None, announce=True):
        """Have the rank's worker capture a version."""
        fds = self.vault.descriptors(Rank(rank))
        rank_entry = self.vault.status_page.rank_entries[rank]
        if slot is None:
            slot = min((held, at) for at, held in enumerate(rank_entry.slots))[1]
        rank_entry.set_slot(slot, BUSY)
        fill_slot(fds[f"slot{slot}"], rank, version, content(rank, version, token) if body is None else body)
        rank_entry.set_slot(slot, version)
        if announce:
            self.replicator.captured(Rank(rank), Version(version))

    def copies_to(self, buddy, rank=0):
        """Have a rank copied to this node only, from now on."""
        buddy.replicator.keep({Rank(rank)})
        self.replicator.set_buddies({Rank(rank): (buddy.peer,)})

    def committed(self, newest, abandoned=()):
        """Have the leader report the newest commit."""
        version = None if newest is None else Version(newest)
        self.vault.status_page.publish(version, abandoned)
        self.replicator.committed(version, abandoned)

    def empty_above(self, rank, version):
        """Have the rank's worker go back to a version."""
        rank_entry, fds = self.vault.status_page.rank_entries[rank], self.vault.descriptors(Rank(rank))
        for slot, held in enumerate(rank_entry.slots):
            if held > version:
                rank_entry.set_slot(slot, EMPTY)
                segments.mark_empty(fds[f"slot{slot}"])

    def holds(self, *versions, transcript=b"a transcript"):
        """Have the worker of rank 0 capture these versions and its transcript."""
        for version in versions:
            self.capture(0, version)
        self.complete_transcript(0, transcript)

    def complete_transcript(self, rank, data=b"a transcript"):
        segments.write_blob(self.vault.descriptors(Rank(rank))["transcript"], data)
        self.replicator.transcript_completed(Rank(rank))

    def body(self, rank, version):
        """Return what the rank's own slots here hold of a version."""
        rank_entry, fds = self.vault.status_page.rank_entries[rank], self.vault.descriptors(Rank(rank))
        return body_of(fds[f"slot{rank_entry.slots.index(version)}"], version)

    def transcript(self, rank):
        return segments.read_blob(self.vault.descriptors(Rank(rank))["transcript"])

    def copy_of(self, rank, version):
        """Return what a copy holds that is kept here; None if there is none."""
        opened = self.replicator._shared.replicas.open(Rank(rank), Version(version))
        if opened is None:
            return None
        copy, fd = opened
        try:
            return body_of(fd, version)
        finally:
            self.replicator._shared.replicas.shut(copy, fd)

    async def until(self, true: Callable[[], bool], limit_s=LIMIT_S):
        """Wait until something is true that changes when something is told."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(true), limit_s)
            except TimeoutError:
                raise AssertionError(f"not within {limit_s:g} s; told: {self.told}") from None

    async def until_safe(self, rank, *versions, transcript=True, timeline=0):
        await self.until(lambda: self.told.get(rank) == (versions, transcript, timeline))

    async def until_serving(self):
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: self.replicator._served), LIMIT_S)

    async def until_waiting(self):
        """Wait until somebody who sends here has to wait for the ranks that live here."""
        assert await asyncio.to_thread(self._waited.wait, LIMIT_S)

    async def seat(self, rank, source=None, resume=None):
        return await self._asked(lambda done: self.replicator.seat(Rank(rank), source, done, resume=resume))

    async def until_fetched(self, rank):
        """Wait for the end of what is fetched for a rank."""
        await off(self.replicator._fetches._tasks[Rank(rank)].thread.join)

    async def fetch(self, rank, version, source):
        return await self._asked(lambda done: self.replicator.fetch(Rank(rank), Version(version), source, done))

    async def compute(self, rank, version):
        return await self._asked(lambda done: self.replicator.compute(Rank(rank), Version(version), done))

    async def _asked(self, ask):
        answer = asyncio.get_running_loop().create_future()
        ask(answer.set_result)
        return await asyncio.wait_for(answer, LIMIT_S)

    def _on_safe(self, rank, versions, transcript, timeline):
        self.told[rank] = (versions, transcript, timeline)
        self.heard(rank, versions, transcript, timeline)
        self._tick()

    def _on_refused(self, rank, node, refuses):
        self.refusals.append((rank, node, refuses))
        self._tick()

    def _serve(self, sock):
        self.replicator.serve(tagged(sock))
        self._tick()

    def _tick(self):
        heartbeat = self.loop.create_task(self._heartbeat())
        self._pulses.add(heartbeat)
        heartbeat.add_done_callback(self._pulses.discard)

    async def _heartbeat(self):
        async with self._changed:
            self._changed.notify_all()

    def _accept(self):
        with contextlib.suppress(OSError):  # it was shut down
            while True:
                sock, _ = self.listener.accept()
                self.loop.call_soon_threadsafe(self._serve, sock)

    async def close(self):
        if self._open:
            self._open = False
            framing.shut_down(self.listener)
            await asyncio.to_thread(self._thread.join)
            self.listener.close()
            await asyncio.sleep(0)  # what was accepted last is given to the replicator
            self.replicator.close()
            self.vault.close()
            await asyncio.gather(*self._pulses)


def connect(address, port):
    return tagged(socket.create_connection((address, port), timeout=LIMIT_S))


@contextlib.asynccontextmanager
async def cluster(*names, **options):
    """Nodes of these names; all are closed in the end."""
    made = [Node(name, **options) for name in names]
    try:
        yield made
    finally:
        for node in made:
            await node.close()


def digests_of(offer, secret=SECRET):
    """Return the digests, none of which is known, of what is offered."""
    return ChunkDigests(Hasher(secret), offer.rank, offer.version, offer.token, offer.nbytes)


class FakeBuddy:
    """The other end of an owner's link, played by the test. Its methods block: call them `off` the loop."""

    def __init__(self, name="fake"):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(LIMIT_S)
        self.peer = Peer(NodeId(name), *self.listener.getsockname())
        self.connection = None
        self.meter = framing.Meter()

    def accept(self):
        self.hang_up()
        sock, _ = self.listener.accept()
        framing.prepare(sock)
        self.connection = tagged(sock)

    def offered(self):
        """Return the next message, which must come."""
        return headers.receive_request(self.connection, 1 << 20, idle=lambda: False)

    def say(self, answer):
        headers.send(self.connection, answer)

    def say_held(self, *held, transcript=None):
        self.say(HeldVersions(list(held), transcript))

    def take(self, offer):
        """Have the offered segment sent, all of it; return how it came."""
        self.say(Go())
        return self.receive(offer)

    def receive(self, offer):
        with memoryview(bytearray(offer.nbytes)) as view:
            return IncomingCopy(view, digests_of(offer), [], self.meter).receive(self.connection, 0, 1)

    async def accepts(self, offer):
        """Have the offered snapshot sent, and say that it is held."""
        assert await off(self.take, offer) is framing.Outcome.WHOLE
        self.say_held((offer.version, offer.token))

    def hang_up(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self):
        self.hang_up()
        self.listener.close()


off = asyncio.to_thread


def in_loop(test):
    """Run a coroutine function as a test."""

    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60), debug=False)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = inspect.signature(test)
    return run
