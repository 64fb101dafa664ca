"""Which peers a failed attempt to connect did not reach."""

import socket
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch.distributed as dist
from kit.world import LIMIT_S, TIMEOUT, _context

from deadpool_run.errors import AttachError
from deadpool_run.worker.groups import gloo, reach
from deadpool_run.worker.groups.connect import ConnectAttempt, GroupConnections, Rendezvous

_PROBE_S = 5.0


def attach_error(member, limit):
    with pytest.raises(AttachError) as raised:
        member.registry.attach(member.store, "e2", limit)
    return raised.value.unreached, str(raised.value)


@pytest.mark.parametrize("missing", [[], [0], [6], [2, 3], list(range(7))])
def test_keys_that_a_store_lacks_are_found(missing):
    store = dist.HashStore()
    for each in set(range(7)) - set(missing):
        store.set(f"@{each}", "")
    assert reach.absent(store, [f"@{each}" for each in range(7)]) == missing


def test_ranks_whose_ports_refuse_are_named_and_others_are_not():
    with ExitStack() as stack:
        open_ = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(300)]
        v6 = stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        closed = socket.create_server(("127.0.0.1", 0))
        refused = closed.getsockname()
        closed.close()
        endpoints = {rank: each.getsockname() for rank, each in enumerate(open_)}
        endpoints |= {300: refused, 301: v6.getsockname()[:2], 302: ("no.such.host.invalid", 1), 303: ("127.0.0.1", -1)}
        assert reach.unreachable(endpoints, _PROBE_S) == [300]


def test_a_peer_whose_queue_is_full_does_not_answer_in_time():
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        assert reach.unreachable({4: listener.getsockname()}, 0.2) == [4]
        assert reach.unreachable({4: listener.getsockname()}, 0.0) == [], "it was not tried"
        assert reach.unreachable({4: listener.getsockname()}, 60.0, lambda: True) == [], "it was cancelled"


def test_of_many_members_that_do_not_come_the_first_are_named():
    connections = GroupConnections(dist.HashStore())
    rendezvous = Rendezvous(connections, "e2", 0, 100)
    attempt = ConnectAttempt(gloo.Device(), None, rendezvous, [], timedelta(seconds=0.2), on_abort=lambda _: None)
    with pytest.raises(AttachError) as raised:
        attempt.run(None)
    assert raised.value.unreached == tuple(range(1, 65))
    assert "not reached: rank 1, 2, 3 and 96 more" in str(raised.value)


def meets_without_rank_1(member):
    member.start()
    member.registry.abort()
    if member.rank == 1:
        member.store.wait(["failed0", "failed2"], TIMEOUT)
        return None
    error = attach_error(member, timedelta(seconds=1))
    member.store.set(f"failed{member.rank}", "1")
    return error


def test_a_member_that_does_not_come_is_named(make_world):
    first, _, last = make_world(3).run(meets_without_rank_1)
    assert first[0] == last[0] == (1,)
    assert "not reached: rank 1" in first[1]


def connects_again(member, aborted, separated):
    member.start()
    member.registry.abort()
    member.meet("aborted")
    if member.rank == 0:
        aborted.set()
    assert separated.wait(LIMIT_S)
    unreached = ()
    try:
        member.registry.attach(member.store, "e2", timedelta(seconds=3))
    except AttachError as error:
        unreached = error.unreached
    member.meet("tried")
    return unreached


def test_of_two_hosts_without_a_path_each_names_the_other(world, hosts):
    """The store's host, and that of rank 0, reach both."""
    aborted, separated = _context.Event(), _context.Event()
    handles = [world.start(rank, connects_again, aborted, separated, host=rank + 1) for rank in range(3)]
    assert aborted.wait(LIMIT_S)
    hosts.separate(2, 3)
    separated.set()
    assert [handle.result() for handle in handles] == [(), (2,), (1,)]
