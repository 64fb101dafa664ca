"""Members come together again in a new epoch: as often as is asked for, interruptible, and with nothing left behind."""

import functools
import gc
import json
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.world import FREED_S, LONG, TIMEOUT

from deadpool_run.core.settings import Settings, more_to_attach_s
from deadpool_run.errors import AttachError, MissingGroupError
from deadpool_run.worker.check.conformance import later
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.groups.connect import GroupConnections, attach_timeout
from deadpool_run.worker.groups.registry import GroupState


@pytest.mark.parametrize("world_size", [2, 64, 512, 4096])
def test_an_attach_may_take_longer_in_a_large_world_but_less_than_the_coordinator_allows(world_size):
    settings = Settings(world_size=world_size)
    limit_s = attach_timeout(world_size, 10).total_seconds()
    assert limit_s == 35 + world_size // 16
    longest_s = attach_timeout(world_size, 1000).total_seconds()
    assert limit_s < longest_s < settings.repair_timeout_s + more_to_attach_s(world_size)


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def waiters():
    """The threads of the pool, which has as many as were ever busy at once."""
    return sum(thread.name == "deadpool-wait" for thread in threading.enumerate())


def rebuilds(member, count):
    member.start()
    sub = dist.new_group([0, 1, 2])
    sizes, times = [], []
    for epoch in range(2, count + 2):
        member.registry.begin_step()
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.all_reduce(x, group=sub)
        assert x[0] == 9
        assert not member.registry.step_failed
        member.registry.abort()
        dist.all_reduce(x)
        start = time.monotonic()
        member.registry.attach(member.store, f"e{epoch}", TIMEOUT)
        times.append(time.monotonic() - start)
        gc.collect()
        member.meet(f"built{epoch}")
        pool = waiters()
        sizes.append((descriptors(), threads() - pool, pool))
    member.registry.shut_down()
    return sizes, sorted(times)[len(times) // 2]


def test_rebuilding_many_times_leaves_threads_and_descriptors_flat(make_world):
    for sizes, median in make_world(3).run(rebuilds, 50):
        assert max(fds for fds, _, _ in sizes) <= sizes[0][0] + 1  # a connection of the last helper may still close
        assert max(tasks for _, tasks, _ in sizes) <= sizes[0][1] + 1
        assert max(pool for _, _, pool in sizes) <= 4  # a release and a freeing, each with one on its way back
        assert median < 1.0


def groups_of_one_name(member):
    """Make a group and destroy it, three times in each of two epochs. Its name derives from its ranks, so it is always the same."""
    member.start()
    kept = dist.new_group([0, 1, 2])
    names, sums = set(), []
    for epoch in range(1, 3):
        if epoch > 1:
            member.registry.abort()
            member.registry.attach(member.store, f"e{epoch}", TIMEOUT)
        for _ in range(3):
            member.registry.begin_step()
            group = dist.new_group([0, 1, 2], use_local_synchronization=True)
            names.add(group.group_name)
            for each in (group, kept):
                x = torch.ones(4)
                dist.all_reduce(x, group=each)
                sums.append(x[0].item())
            dist.destroy_process_group(group)
        member.meet(f"used{epoch}")
    member.registry.shut_down()
    return len(names), sums


def test_a_group_may_have_the_name_of_one_that_was_destroyed(make_world):
    assert make_world(3).run(groups_of_one_name) == [(1, [3.0] * 12)] * 3


def wait_for_threads(count):
    """Until no more are left; a thread that was joined is seen a moment longer by the kernel."""
    deadline = time.monotonic() + 20
    while threads() > count and time.monotonic() < deadline:
        threading.Event().wait(0.005)


def free_what_was_cut(member):
    with pytest.raises(AttachError):
        member.registry.attach(member.store, "never", LONG, lambda: True)


def leaves_after(seconds, interrupt, member, store, timeout):
    """Begin an attach that cannot end, and interrupt it so much later; return how long it took to be left, in seconds."""
    with later(seconds, interrupt) as interrupted:
        with pytest.raises(AttachError, match="another member was lost"):
            member.registry.attach(store, "e2", timeout)
        return time.monotonic() - interrupted[0]


def waits_for_a_missing_member(member):
    member.start()
    member.registry.abort()
    if member.rank == 1:
        member.store.wait(["done0"], TIMEOUT)
        return None
    free_what_was_cut(member)
    before = threads()
    raised = leaves_after(0.2, member.registry.abort, member, member.store, LONG)
    assert member.registry.state is GroupState.ABORTED
    with pytest.raises(AttachError, match="did not connect"):
        member.registry.attach(member.store, "e3", timedelta(seconds=0.3))
    with pytest.raises(AttachError):
        member.registry.attach(member.store, "e4", LONG, lambda: True)
    dist.all_reduce(torch.ones(2))  # fake
    wait_for_threads(before)
    member.store.set("done0", "1")
    return raised, threads() - before


def test_an_attach_is_interrupted_and_its_helper_ends(make_world):
    raised, left = make_world(2).run(waits_for_a_missing_member)[0]
    assert raised < FREED_S
    assert left <= 0


def follows_the_store(member):
    """The store moves to another address; the attach in which the old one still counts is not theirs any more."""
    member.start()
    member.registry.abort()
    if member.rank == 0:
        moved = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        member.store.set("moved", str(moved.port))
    open_moved = functools.partial(c10d.open_store, "127.0.0.1", int(member.store.get("moved")), TIMEOUT)
    for epoch in ("e2", "e3"):
        member.registry.attach(open_moved, epoch, LONG)
        dist.all_reduce(x := torch.ones(2))
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        member.meet(epoch)
        member.registry.abort()
    assert open_moved().check(["e2/@0", "e3/@1"])
    assert not member.store.check(["e2/@0"])
    member.meet("end")
    return x.tolist(), member.failures


def test_members_meet_at_a_store_that_has_moved(make_world):
    assert make_world(2).run(follows_the_store) == [([4.0, 4.0], [])] * 2


def connects_to_nobody(member):
    """The new store's host does not answer: the attach is left at once all the same."""
    member.start()
    member.registry.abort()
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, says nothing
    open_silent = functools.partial(c10d.open_store, *silent.getsockname(), timedelta(seconds=2))
    raised = leaves_after(0.2, member.registry.abort, member, open_silent, LONG)
    with pytest.raises(AttachError, match="the store does not answer"):
        member.registry.attach(open_silent, "e2", timedelta(seconds=0.3))
    silent.close()
    member.registry.attach(member.store, "e3", LONG)
    dist.all_reduce(x := torch.ones(2))
    return raised < FREED_S, x.tolist()


def test_a_store_that_does_not_answer_holds_nobody(make_world):
    assert make_world(2).run(connects_to_nobody) == [(True, [2.0, 2.0])] * 2


def is_stuck_in_gloo(member):
    """The other member announces itself and then dies: Gloo waits for it in a call that nothing can end early."""
    member.start()
    member.registry.abort()
    if member.rank == 1:
        mine = json.dumps({"endpoint": ["127.0.0.1", 1], "groups": ["0"]})
        member.store.set("e2/@1", mine)
        if member.store.add("e2/@come", 1) == 2:
            member.store.set("e2/@go", f"[{member.store.get('e2/@0').decode()},{mine}]")
        member.store.wait(["done"], TIMEOUT)
        return None
    free_what_was_cut(member)
    before = threads(), descriptors()
    raised = leaves_after(0.3, member.registry.abort, member, member.store, timedelta(seconds=3))
    busy = any(thread.name == "deadpool-attach" for thread in threading.enumerate())
    wait_for_threads(before[0])
    member.store.set("done", "1")
    return raised, busy, threads() - before[0], descriptors() - before[1]


def meets_garbage(member, entry):
    """The store's port is open to others: what they write there is no member."""
    member.start()
    member.registry.abort()
    if member.rank == 1:
        member.store.set("e2/@1", entry)
        member.store.wait(["e2/@0"], TIMEOUT)
        if member.store.add("e2/@come", 1) == 2:
            member.store.set("e2/@go", f"[{member.store.get('e2/@0').decode()},{entry}]")
        return None
    with pytest.raises(AttachError) as raised:
        member.registry.attach(member.store, "e2", TIMEOUT)
    return str(raised.value)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("what", "a member's entry in the store is none: not JSON"),
        ('{"endpoint": ["127.0.0.1"], "groups": []}', "a member's entry in the store is none: not a list"),
        (
            '{"endpoint": ["::1", 1], "groups": []}, {"endpoint": ["::1", 1], "groups": []}',
            "has 3 entries of 2 members",
        ),
    ],
)
def test_an_entry_that_is_no_members_fails_the_attach(make_world, entry, why):
    assert why in make_world(2).run(meets_garbage, entry)[0]


def test_an_attach_that_is_stuck_in_gloo_is_left_at_once_and_ends_by_itself(make_world):
    raised, busy, threads_left, descriptors_left = make_world(2).run(is_stuck_in_gloo)[0]
    assert raised < FREED_S
    assert busy, "Gloo did not block: the test shows nothing"
    assert threads_left <= 0
    assert descriptors_left <= 1  # a connection to the store is kept for the next attach


def lacks_a_group(member):
    member.start()
    if member.rank == 0:
        member.registry.abort()
        dist.new_group([0, 1])
    member.meet("created")
    member.registry.abort()
    with (
        pytest.raises(MissingGroupError, match=r"ranks \[1\] are members of the group")
        if member.rank == 0
        else pytest.raises(AttachError)
    ):
        member.registry.attach(member.store, "e2", timedelta(seconds=2))
    return True


def test_a_group_that_not_every_member_has_is_named(make_world):
    assert all(make_world(2).run(lacks_a_group))


def test_an_attempt_to_connect_does_not_wait_for_an_older_one():
    """The old store's host may not answer: who is to meet elsewhere must not wait behind that."""
    entered, answer = threading.Event(), threading.Event()
    stores = [dist.HashStore(), dist.HashStore()]

    def source():
        if not entered.is_set():
            entered.set()
            answer.wait(LONG.total_seconds())
            return stores[0]
        return stores[1]

    connections = GroupConnections(source)
    older = threading.Thread(target=connections.take)
    older.start()
    assert entered.wait(LONG.total_seconds())
    newer = threading.Thread(target=connections.take)
    newer.start()
    newer.join(LONG.total_seconds())
    waited = newer.is_alive()
    answer.set()
    older.join()
    newer.join()
    assert not waited
