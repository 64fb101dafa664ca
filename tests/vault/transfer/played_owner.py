"""An owner of rank 0 that a test plays to a node's vault."""

import contextlib
import os

from vault_kit import LIMIT_S, SECRET, Node, connect, content, fill_slot, off

from deadpool_run.ids import Rank
from deadpool_run.vault import segments
from deadpool_run.vault.transfer import exchange, framing, headers
from deadpool_run.vault.transfer.chunks import ChunkDigests, Hasher
from deadpool_run.vault.transfer.framing import Outcome
from deadpool_run.vault.transfer.headers import Go


class Owner:
    """An owner of rank 0 elsewhere, played by the test."""

    def __init__(self, node):
        self.connection = connect(*node.listener.getsockname())
        self.sock = self.connection.sock
        self.sock.settimeout(LIMIT_S)
        self.fd = segments.create_memory("played")
        self.lacking = 0
        """The chunks that the node asked for."""

    def write(self, version, token=0, rank=0):
        fill_slot(self.fd, rank, version, content(rank, version, token))
        header = segments.read_header(self.fd)
        self.token = header.token
        self.bytes = os.pread(self.fd, header.used_bytes, 0)

    def ask(self, **message):
        self.asked = message
        headers.send(self.connection, message)
        return headers.receive_answer(self.connection)

    def offer(self, version, timeline=0, held=None):
        held = [(version, self.token)] if held is None else held
        return {
            "type": "Put",
            "rank": 0,
            "version": version,
            "token": self.token,
            "nbytes": len(self.bytes),
            "timeline": timeline,
            "held": held,
            "of": 1,
            "delivery": bytes(16),
        }

    def put(self, version, timeline=0, held=None, **other):
        return self.ask(**(self.offer(version, timeline, held) | other))

    def digests(self, secret=SECRET):
        """Return the digests, none of which is known, of what was offered last."""
        asked = self.asked
        return ChunkDigests(Hasher(secret), asked["rank"], asked["version"], asked["token"], asked["nbytes"])

    def send(self, blocks=None, status=Outcome.WHOLE, *, secret=SECRET, sent=None, root=None):
        """Send a segment, or `sent` in the place of its bytes, and return the answer."""
        digests = self.digests(secret)
        self.send_blocks(digests.blocks if blocks is None else blocks, digests, sent)
        self.say(exchange._END, status, root or digests.root(0, 1))
        return headers.receive_answer(self.connection)

    def send_blocks(self, blocks, digests=None, sent=None):
        """Send the first blocks, and no end."""
        digests = digests or self.digests()
        with memoryview(self.bytes) as view:
            for number in range(blocks):
                self.say(exchange._DIGESTS, body=digests.of_block(number, view))
                block = digests.block(number)
                answer = framing.receive_tagged(self.connection, len(block))
                missing = [
                    (sent or self.bytes)[slice(*each)] for each, lacks in zip(block, answer, strict=True) if lacks
                ]
                self.lacking += len(missing)
                if missing:
                    self.say(exchange._CHUNKS, sum(map(len, missing)))
                    self.sock.sendall(b"".join(missing))

    def say(self, kind, number=None, body=b""):
        head = exchange._HEAD.pack(kind, len(body) if number is None else number)
        self.connection.send(*filter(None, (head, body)))

    def put_all(self, version, timeline=0, **other):
        assert self.put(version, timeline, **other) == Go()
        return self.send()

    async def gives(self, version):
        """Have a version taken, and the transcript, without which nothing can be had."""
        self.write(version)
        await off(self.put_all, version)
        await off(take_transcript, self)

    def close(self):
        self.sock.close()
        os.close(self.fd)


@contextlib.asynccontextmanager
async def pair():
    node = Node("b")
    node.replicator.keep({Rank(0)})
    owner = Owner(node)
    try:
        yield node, owner
    finally:
        owner.close()
        await node.close()


def take_transcript(owner):
    """Have the transcript taken."""
    snapshot = owner.bytes, owner.token
    fd = segments.create_memory("transcript")
    segments.write_blob(fd, b"a transcript")
    nbytes, owner.token = segments.blob_header(fd)
    owner.bytes = os.pread(fd, nbytes, 0)
    os.close(fd)
    held = [(snapshot_version(snapshot[0]), snapshot[1])]
    answer = owner.put_all(None, held=held)
    owner.bytes, owner.token = snapshot
    return answer


def snapshot_version(data):
    return segments.parse_header(data, len(data)).version
