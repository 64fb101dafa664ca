"""Members on hosts of their own, one of which vanishes: no packet comes from it any more, and no end of a connection.

The hosts are network namespaces.
"""

import os
import threading
import time
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.world import FREED_S, LIMIT_S, LONG, TIMEOUT, _context

from deadpool_run.worker.groups import gloo
from deadpool_run.worker.groups.registry import GroupState

LARGE = 1 << 24
"""Floats: more than the kernel's buffers take, so that some of it waits for ever to be sent."""


def sends(tensor):
    dist.send(torch.ones(LARGE), dst=1)


def reduces_over_and_over(tensor):
    while not reduces_over_and_over.registry.step_failed:
        dist.all_reduce(torch.ones(LARGE))


def exchanges_short_messages(tensor):
    while not exchanges_short_messages.registry.step_failed:
        dist.send(torch.ones(8), dst=1)
        dist.recv(tensor, src=1)


BLOCKED = {
    "all_reduce": dist.all_reduce,
    "barrier": lambda _: dist.barrier(),
    "recv": lambda x: dist.recv(x, src=1),
    "send": sends,
    "midst": reduces_over_and_over,
    "short": exchanges_short_messages,
}


def answers(member, name):
    """Rank 1's part, until its host vanishes."""
    if name == "midst":
        reduces_over_and_over(None)
    x = torch.ones(64)
    while name == "short":
        for peer in (0, 2):
            dist.recv(x, src=peer)
            dist.send(x, dst=peer)
    threading.Event().wait(LIMIT_S)


def outlives_a_host(member, name, ready, vanished, replaced):
    """Ranks 0 and 2 block on rank 1, whose host vanishes; both are freed by an abort, and go on with another rank 1."""
    gloo._UNANSWERED_MS = 500
    member.start(timeout=LONG)
    for blocking in (reduces_over_and_over, exchanges_short_messages):
        blocking.registry = member.registry
    here, peers = member.registry._gloo_device.endpoint, member.registry._peers
    assert here == (os.environ["DEADPOOL_NODE_ADDR"], here[1])
    assert peers[member.rank] == here
    member.meet("ready")
    member.registry.begin_step()
    if member.rank == 1:
        ready.set()
        answers(member, name)
    aborted = []

    def abort():
        assert vanished.wait(LIMIT_S)
        threading.Event().wait(0.2)  # for what is on its way to block
        assert not member.registry.step_failed, "it was freed before: the test shows nothing"
        aborted.append(time.monotonic())
        member.registry.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    BLOCKED[name](torch.ones(64))
    freed = time.monotonic()
    thread.join()
    assert member.registry.step_failed
    assert replaced.wait(LIMIT_S)
    member.registry.attach(member.store, "e2", LONG)
    dist.all_reduce(x := torch.ones(2))
    wait_until_nothing_is_sent_to(IPv4Address(peers[1][0]), member.store.port)
    member.store.set(f"done{member.rank}", "1")
    return freed - aborted[0], x.tolist(), member.failures


def wait_until_nothing_is_sent_to(address, store_port):
    deadline = time.monotonic() + 15
    while left := connections_to(address, store_port):
        assert time.monotonic() < deadline, left
        threading.Event().wait(0.05)


def connections_to(address, store_port):
    """The kernel's lines about this namespace's connections to that address, but for those of the store itself."""
    spelled = f"{int.from_bytes(address.packed, 'little'):08X}"
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/thread-self/net/{table}").read_text().splitlines()[1:]:
            _, here, there, *_ = line.split()
            if there.partition(":")[0].endswith(spelled) and not here.endswith(f":{store_port:04X}"):
                found.append(line)
    return found


def takes_the_place(member):
    member.start(attached=False)
    member.registry.attach(member.store, "e2", LONG)
    dist.all_reduce(x := torch.ones(2))
    member.store.wait(["done0", "done2"], TIMEOUT)
    return x.tolist(), member.registry.state


@pytest.mark.parametrize("name", BLOCKED)
def test_a_host_that_vanishes_in_silence_holds_nobody(world, hosts, name):
    ready, vanished, replaced = _context.Event(), _context.Event(), _context.Event()
    handles = world.start_all(outlives_a_host, name, ready, vanished, replaced)
    assert ready.wait(LIMIT_S)
    hosts.cut(1)
    vanished.set()
    replacement = world.start(1, takes_the_place, host=3)
    replaced.set()
    for rank in (0, 2):
        seconds, total, failures = handles[rank].result()
        assert seconds < FREED_S
        assert total == [3.0, 3.0]
        assert failures == []
    assert replacement.result() == ([3.0, 3.0], GroupState.ATTACHED)
