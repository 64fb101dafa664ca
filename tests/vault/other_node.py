"""A node in a process of its own, to be killed: `owner PORT` or `buddy`.

An owner has rank 0 copied to the given port: its transcript and version 0 at once, then version 1, which takes long. A
buddy holds copies of rank 0, slowly: it reads nothing of the second snapshot.
"""

import asyncio
import sys

from vault_kit import LIMIT_S, FakeBuddy, Node, content

from deadpool_run.ids import NodeId, Rank
from deadpool_run.vault.transfer.headers import Go
from deadpool_run.wire.peers import Peer

LARGE = 64 << 20


def say(text):
    print(text, flush=True)


async def own(port):
    node = Node("owner", bandwidth=LARGE // 30)
    node.capture(0, 0)
    node.complete_transcript(0)
    node.replicator.set_buddies({Rank(0): (Peer(NodeId("buddy"), "127.0.0.1", port),)})
    await node.until_safe(0, 0)
    node.capture(0, 1, body=content(0, 1, nbytes=LARGE))
    say("captured")
    await asyncio.sleep(3 * LIMIT_S)


def hold():
    buddy = FakeBuddy()
    say(buddy.peer.port)
    buddy.accept()
    buddy.offered()
    buddy.say(Go())
    say("taking")
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "owner":
        asyncio.run(own(int(sys.argv[2])))
    else:
        hold()
