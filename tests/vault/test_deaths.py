"""Real processes that are killed while copies are on their way."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from vault_kit import LIMIT_S, cluster, connect, content, in_loop, off

from deadpool_run.ids import NodeId, Rank
from deadpool_run.wire.peers import Peer

SCRIPT = Path(__file__).with_name("other_node.py")


@contextlib.contextmanager
def other(*args):
    root = SCRIPT.parent.parent
    path = os.pathsep.join([str(root.parent), str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *args],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


async def line_of(process):
    return (await off(process.stdout.readline)).strip()


@in_loop
async def test_an_owner_is_killed_while_it_sends():
    async with cluster("b") as (b,):
        b.replicator.keep({Rank(0)})
        with other("owner", str(b.peer.port)) as owner:
            assert await line_of(owner) == "captured"
            first = b.replicator.traffic().received_bytes
            deadline = b.loop.time() + LIMIT_S
            while b.replicator.traffic().received_bytes == first:
                assert b.loop.time() < deadline, "version 1 never came"
                await off(os.sched_yield)
            (served,) = b.replicator._served
            owner.kill()
            await off(served.thread.join, LIMIT_S)
        assert not served.thread.is_alive()
        assert b.replicator.versions(Rank(0)) == (0,)
        assert b.copy_of(0, 0) == content(0, 0)
        assert await b.seat(0) is None
        assert b.body(0, 0) == content(0, 0)


@in_loop
async def test_a_buddy_is_killed_while_it_takes():
    async with cluster("a", "c") as (a, c):
        a.capture(0, 0, body=content(0, 0, nbytes=32 << 20))
        with other("buddy") as buddy:
            port = int(await line_of(buddy))
            a.replicator.set_buddies({Rank(0): (Peer(NodeId("killed"), "127.0.0.1", port),)})
            assert await line_of(buddy) == "taking"
            buddy.kill()
            await off(buddy.wait, LIMIT_S)
        a.capture(0, 1)
        assert a.told[0] == ((), False, 0)
        a.copies_to(c)
        await a.until_safe(0, 1, transcript=False)
        assert c.copy_of(0, 1) == content(0, 1)


@in_loop
async def test_a_buddy_that_comes_up_late_is_found():
    dialled = []

    def dial(address, port):
        dialled.append(port)
        if len(dialled) < 4:
            raise ConnectionRefusedError("not yet")
        return connect(address, port)

    async with cluster("b") as (b,), cluster("a", dial=dial) as (a,):
        a.capture(0, 0)
        a.copies_to(b)
        await a.until_safe(0, 0, transcript=False)
        assert len(dialled) == 4


@in_loop
async def test_a_buddy_that_is_gone_is_not_tried_at_every_capture():
    dialled = []

    def dial(_address, port):
        dialled.append(port)
        raise ConnectionRefusedError("gone")

    async with cluster("a", dial=dial) as (a,):
        began = a.loop.time()
        a.replicator.set_buddies({Rank(0): (Peer(NodeId("gone"), "127.0.0.1", 1),)})
        for version in range(300):
            a.capture(0, version)
            await off(os.sched_yield)
        took = a.loop.time() - began
        assert 1 <= len(dialled) <= 2 + took / 0.05
