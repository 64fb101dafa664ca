"""A member dies or an abort is ordered: what blocks is freed at once, nothing raises, nothing else is touched."""

import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from kit.choice import often
from kit.world import FREED_S, LONG, TIMEOUT
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.errors import SnapshotError
from deadpool_run.worker.check.conformance import later
from deadpool_run.worker.groups.ddp_buckets import check_undecided
from deadpool_run.worker.groups.registry import GroupState


def receive_from_any(tensor):
    dist.recv(tensor)


def monitored(tensor):
    dist.monitored_barrier()


def objects(tensor):
    dist.all_gather_object([None] * dist.get_world_size(), {"a": 1})


def broadcast_objects(tensor):
    got = ["mine"]
    dist.broadcast_object_list(got, src=1)
    assert got in (["mine"], [None]), got


def functional(tensor):
    (funcol.all_reduce(tensor, "sum", dist.group.WORLD) + 1).sum().item()


def future(tensor):
    assert len(dist.all_reduce(tensor, async_op=True).get_future().wait()) == 1


def new_group(tensor):
    group = dist.new_group([0, 1, 2])
    dist.all_reduce(tensor, group=group)


def in_the_midst(tensor):
    """Rank 1's part of a transfer is on its way when the loss comes."""
    dist.broadcast(torch.ones(1 << 24), src=0)
    dist.all_reduce(torch.ones(1 << 22))


BLOCKED = {
    "in_the_midst": in_the_midst,
    "all_reduce": dist.all_reduce,
    "future": future,
    "barrier": lambda _: dist.barrier(),
    "broadcast": lambda x: dist.broadcast(x, src=1),
    "broadcast_objects": broadcast_objects,
    "functional": functional,
    "monitored_barrier": monitored,
    "new_group": new_group,
    "objects": objects,
    "recv": lambda x: dist.recv(x, src=1),
    "recv_anysource": receive_from_any,
}


def loses_a_peer(member, name):
    """Rank 1 never joins and is killed; rank 0's and 2's report: seconds from the kill until freed."""
    member.start(timeout=LONG)
    tensor = torch.ones(64)
    functional(tensor)  # the first one imports a lot
    member.meet("ready")
    if member.rank == 1:
        threading.Event().wait(60)
    member.registry.begin_step()
    BLOCKED[name](tensor)
    freed = time.monotonic()
    killed = float(member.store.get("killed"))
    assert member.registry.state is GroupState.ABORTED
    assert member.registry.step_failed
    dist.all_reduce(tensor)  # fake
    dist.barrier()
    assert torch.isfinite(tensor).all()
    return freed - killed, len(member.failures)


# A new group's members have no connection yet that could break, and Gloo does not tell a receive from any rank: these
# two are freed by the abort that the agent orders. So is a survivor that waits for the rest of a message of the other one,
# which has noticed the loss in the midst of sending it.
SEES_A_LOSS = sorted(BLOCKED.keys() - {"in_the_midst", "new_group", "recv_anysource"})


@pytest.mark.parametrize("name", SEES_A_LOSS)
def test_a_killed_peer_frees_the_others_without_raising(make_world, name):
    world = make_world(3)
    handles = world.start_all(loses_a_peer, name)
    world.store.wait(["met/ready"], TIMEOUT)
    # The survivors are about to block, or have: the connection breaks in both cases.
    world.store.set("killed", str(time.monotonic()))
    handles[1].kill()
    for rank in (0, 2):
        seconds, failures = handles[rank].result()
        assert seconds < FREED_S
        assert failures == 1


def loses_a_peer_as_ddp_decides(member):
    """Rank 0, whose buckets all others take, is killed before the second forward."""
    member.start(timeout=LONG)
    member.registry.hold = check_undecided
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    member.registry.begin_step()
    model(torch.ones(2, 4)).sum().backward()
    member.meet("ready")
    if member.rank == 0:
        threading.Event().wait(60)
    member.registry.begin_step()
    try:
        model(torch.ones(2, 4)).sum().backward()
    except SnapshotError as error:
        return str(error)
    return "it went on"


def test_ddp_gets_no_fake_buckets(make_world):
    """With them, its backward writes anywhere: the process may crash."""
    world = make_world(3)
    handles = world.start_all(loses_a_peer_as_ddp_decides)
    world.store.wait(["met/ready"], TIMEOUT)
    handles[0].kill()
    for rank in (1, 2):
        assert "a peer was lost while DDP decided its buckets" in handles[rank].result()


def is_aborted(member, name):
    """Ranks 0 and 2 block on rank 1, which stays; each is freed by its own abort, ordered by another thread."""
    member.start(timeout=LONG)
    server = socket.create_server(("127.0.0.1", 0))  # a user's own connection, as a data loader may have
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    member.meet("ready")
    if member.rank == 1:
        member.store.wait(["done0", "done2"], TIMEOUT)
        return None
    member.registry.begin_step()

    def abort_twice():
        member.registry.abort()
        member.registry.abort()

    with later(0.1, abort_twice) as aborted:
        BLOCKED[name](torch.ones(64))
        freed = time.monotonic()
    assert member.registry.step_failed
    client.sendall(b"still here")
    assert accepted.recv(64) == b"still here"
    with socket.create_connection(server.getsockname()):
        member.store.set(f"done{member.rank}", "1")
    return freed - aborted[0], len(member.failures)


@pytest.mark.parametrize(
    "name", ["all_reduce", "in_the_midst", "recv", "recv_anysource", "new_group", "monitored_barrier", "future"]
)
def test_an_abort_frees_this_process_and_leaves_its_other_sockets(make_world, name):
    results = make_world(3).run(is_aborted, name)
    for seconds, failures in (results[0], results[2]):
        assert seconds < FREED_S
        # an abort is no failure of its own; one may precede it where the other rank's came first
        assert failures <= 1


LARGE = 1 << 26
"""Floats; their transfer takes a tenth of a second and more."""


def is_cut_in_the_midst(member, kind):
    """Gloo never ends what is cut in the middle of a message, before its own time-out, which comes after the repair."""
    member.start(timeout=timedelta(seconds=3))
    tensor = torch.full((LARGE,), float(member.rank + 1))
    member.meet("ready")
    if kind == "peer":
        work = dist.isend(tensor, 1) if member.rank == 0 else dist.irecv(tensor, 0)
    elif kind == "reduce_scatter":
        work = dist.reduce_scatter_tensor(tensor[: LARGE // 2].clone(), tensor, async_op=True)
    else:
        work = dist.broadcast(tensor, 0, async_op=True)
    with later(0.03, member.registry.abort) as aborted:
        if kind == "future":
            work.get_future().wait()
        else:
            work.wait()
        freed = time.monotonic()
    cut = member.registry.step_failed
    member.meet("cut")
    start = time.monotonic()
    member.registry.attach(member.store, "e2", LONG)
    assert time.monotonic() - start < 2.5, "the attach waited for Gloo's time-out"
    x = torch.ones(2)
    dist.all_reduce(x)
    work.wait()
    threading.Event().wait(3.5)  # Gloo's time-out for what was cut: it must not be taken for a failure of the new epoch
    dist.all_reduce(x)
    assert x.tolist() == [4.0, 4.0]
    assert member.registry.state is GroupState.ATTACHED
    assert not member.registry.step_failed
    member.registry.shut_down()
    return freed - aborted[0], cut, member.failures


@pytest.mark.parametrize("kind", often(["peer", "collective", "future", "reduce_scatter"], {"peer", "future"}))
def test_a_message_that_is_cut_in_the_middle_holds_nobody(make_world, kind):
    results = make_world(2).run(is_cut_in_the_midst, kind)
    assert all(seconds < FREED_S for seconds, _, _ in results), results
    assert any(cut for _, cut, _ in results), "nothing was cut: the test shows nothing"
    assert all(len(failures) <= 1 for _, _, failures in results)


def keeps_a_work(member):
    """A work from before the loss is waited for after the repair."""
    member.start(timeout=LONG)
    works = [dist.all_reduce(torch.ones(2), async_op=True)] if member.rank == 0 else []
    member.meet("issued")
    member.registry.abort()
    member.registry.attach(member.store, "e2", LONG)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert not member.registry.step_failed
    for work in works:
        work.wait()
        assert member.registry.step_failed  # what it gave is no sum
    dist.all_reduce(x)
    return x.tolist(), member.registry.state, member.failures


def test_a_work_of_an_older_epoch_does_not_harm_the_new_one(make_world):
    assert make_world(2).run(keeps_a_work) == [([4.0, 4.0], GroupState.ATTACHED, [])] * 2


def blocks_on_other_addresses(member, variables):
    os.environ.update(variables[member.rank])
    member.start(timeout=LONG)
    if member.rank == 1:
        member.store.wait(["done"], TIMEOUT)
        return None
    with later(0.1, member.registry.abort):
        start = time.monotonic()
        dist.all_reduce(torch.ones(64))
        seconds = time.monotonic() - start
    member.store.set("done", "1")
    return seconds, member.registry.step_failed


@pytest.mark.parametrize(
    "variables",
    [
        ({"DEADPOOL_NODE_ADDR": "127.0.0.2"}, {"DEADPOOL_NODE_ADDR": "127.0.0.3"}),
        ({"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "lo"}),
    ],
    ids=["address", "interface"],
)
def test_connections_are_found_whatever_the_address(make_world, variables):
    seconds, step_failed = make_world(2).run(blocks_on_other_addresses, variables)[0]
    assert seconds < FREED_S
    assert step_failed


def times_out(member):
    member.start(timeout=timedelta(seconds=1))
    member.meet("started")
    member.registry.abort()
    member.registry.attach(member.store, "e2", LONG)
    member.meet("attached")
    if member.rank == 1:
        member.store.wait(["done"], TIMEOUT)
        return None
    seconds = []
    for block in (dist.all_reduce, lambda x: dist.recv(x, src=1)):
        start = time.monotonic()
        member.registry.begin_step()
        block(torch.ones(2))
        seconds.append(time.monotonic() - start)
    member.store.set("done", "1")
    return seconds, member.registry.state, member.failures


def test_a_time_out_of_the_users_starts_an_abort_and_is_not_that_of_attach(make_world):
    seconds, state, failures = make_world(2).run(times_out)[0]
    assert 0.5 < seconds[0] < 5
    assert seconds[1] < FREED_S
    assert state is GroupState.ABORTED
    assert len(failures) == 1
