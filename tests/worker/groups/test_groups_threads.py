"""Collectives of the script's own threads: a lost peer raises there, and the running step is not touched."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from kit.world import LONG, TIMEOUT

from deadpool_run.errors import PeerLostError
from deadpool_run.worker.check.conformance import later
from deadpool_run.worker.groups.registry import GroupState
from deadpool_run.worker.process.script_threads import is_scripts


def in_thread(act):
    """Call `act` in a new thread, and return its result or what it raised."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act)
        return future.exception() or future.result()


def gather():
    told = [None, None]
    dist.all_gather_object(told, dist.get_rank())
    return told


def from_any():
    tensor = torch.ones(4)
    dist.recv(tensor)
    return tensor.tolist()


def by_future():
    return dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()


def scattered():
    return dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4))


def monitored():
    return dist.monitored_barrier()


WAYS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "objects": gather,
    "future": by_future,
    "recv from any": from_any,
    "reduce_scatter": scattered,
    "monitored barrier": monitored,
    "new group": lambda: dist.new_group([0, 1]),
}


def begins_alone(member):
    """Begin a step on rank 0. Rank 1 takes no part in it: return False there, when rank 0 is done."""
    member.start(timeout=LONG)
    member.meet("ready")
    if member.rank == 1:
        member.store.wait(["done"], TIMEOUT)
        return False
    member.registry.begin_step()
    return True


def is_cut_in_a_thread(member, way):
    if not begins_alone(member):
        return None
    held = []
    member.registry.hold = lambda: held.append(way)
    with later(0.2, member.registry.abort):
        cut = in_thread(WAYS[way])
    refused = in_thread(WAYS["all_reduce"])
    assert len(held) >= 2, "outside the loop, each must wait for the end of the process"
    touched = member.registry.step_failed
    dist.all_reduce(torch.ones(4))  # the step itself goes on with fake results
    member.store.set("done", "1")
    return type(cut), type(refused), touched, member.registry.step_failed


@pytest.mark.parametrize("way", WAYS)
def test_a_collective_that_is_cut_raises_in_the_scripts_thread(make_world, way):
    cut, refused, touched, failed = make_world(2).run(is_cut_in_a_thread, way)[0]
    assert (cut, refused) == (PeerLostError, PeerLostError)
    assert not touched
    assert failed


def keeps_works(member):
    """Rank 0 issues, in a thread and in an earlier step, what rank 1 never does; all of it is waited for after the repair."""
    member.start(timeout=LONG)
    member.registry.begin_step()
    waited, go_on, told = threading.Event(), threading.Event(), []

    def scripts():
        work = dist.all_reduce(torch.ones(2), async_op=True)
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        waited.set()
        assert go_on.wait(30)
        for wait in (work.wait, future.wait, work.wait):
            try:
                told.append(wait())
            except Exception as error:  # noqa: BLE001 - a future passes on its own kind
                told.append(str(error))

    if member.rank == 0:
        thread = threading.Thread(target=scripts)
        thread.start()
        assert waited.wait(30)
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()  # of a step that is over when it is cut
    member.meet("issued")
    member.registry.begin_step()
    member.meet("over")  # else rank 1 may cut the collectives while the step that has issued them runs
    member.registry.abort()
    member.registry.attach(member.store, "e2", LONG)
    member.registry.begin_step()
    if member.rank == 0:
        go_on.set()
        thread.join()
        try:
            told.append(future.wait())
        except Exception as error:  # noqa: BLE001
            told.append(str(error))
    failed = member.registry.step_failed
    x = torch.ones(2)
    dist.all_reduce(x)
    return told, failed, x.tolist(), member.registry.state


def test_works_of_before_a_loss_say_so_and_leave_the_step_after_the_repair_alone(make_world):
    found = make_world(2).run(keeps_works)
    assert [each[1:] for each in found] == [(False, [2.0, 2.0], GroupState.ATTACHED)] * 2
    assert len(found[0][0]) == 4
    assert all("a peer was lost" in str(told) for told in found[0][0]), found[0][0]


def goes_on_after_a_repair(member):
    member.start(timeout=LONG)
    member.registry.begin_step()
    group = dist.new_group([0, 1])
    begun, go_on, told = threading.Event(), threading.Event(), []
    idle, busy = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def reduced():
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        return x.tolist()

    def waits():
        in_task.set()
        assert go_on.wait(30)
        return reduced()

    def older():
        told.append(reduced())
        begun.set()
        assert go_on.wait(30)
        for _ in range(2):
            try:
                told.append(reduced())
            except PeerLostError as error:
                told.append(str(error))

    assert idle.submit(reduced).result() == [2.0, 2.0]
    thread = threading.Thread(target=older, name="meter")
    thread.start()
    assert begun.wait(30)
    in_task = threading.Event()
    if member.rank == 0:  # a replacement's executor has no task
        cut = busy.submit(waits)
        assert in_task.wait(30)
    else:
        cut = None
    member.meet("issued")
    member.registry.abort()
    member.registry.attach(member.store, "e2", LONG)
    member.registry.begin_step()
    go_on.set()
    thread.join()
    assert cut is None or "since before" in str(cut.exception())
    found = [told, in_thread(reduced), [pool.submit(reduced).result() for pool in (idle, busy)]]
    idle.shutdown()
    busy.shutdown()
    return found, member.registry.step_failed, member.registry.state


def test_a_thread_of_before_a_loss_is_refused_and_a_new_one_is_not(make_world):
    for (told, new, pools), failed, state in make_world(2).run(goes_on_after_a_repair):
        first, *refused = told
        assert first == [2.0, 2.0]
        assert all("meter" in each and "new thread" in each for each in refused), refused
        assert (new, *pools) == ([2.0, 2.0],) * 3
        assert (failed, state) == (False, GroupState.ATTACHED)


def keeps_a_future(member):
    if not begins_alone(member):
        return None

    def issue():
        work = dist.all_reduce(torch.ones(4), async_op=True)
        return work.get_future(), weakref.ref(work, lambda _: freed.set())

    freed = threading.Event()
    future, work = in_thread(issue)
    member.registry.abort()
    try:
        future.wait()
    except PeerLostError as error:
        told = str(error)
    del future
    for _ in range(50):  # the thread that completed the future may be in there still
        gc.collect()
        if freed.wait(0.1):
            break
    member.store.set("done", "1")
    return "a peer was lost" in told, work() is None


def test_a_cut_future_frees_its_work(make_world):
    assert make_world(2).run(keeps_a_future)[0] == (True, True)


class Reduced(torch.autograd.Function):
    """Reduces its gradient, as a layer of tensor parallelism does."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        dist.all_reduce(gradient)
        return gradient


def is_cut_in_parts_of_a_step(member):
    """A backward in a thread, and a callback that runs on Gloo's thread."""
    member.start(timeout=LONG)
    called = threading.Event()
    seen = []
    if member.rank == 1:
        member.store.wait(["waiting"], TIMEOUT)
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    future.add_done_callback(lambda _: (seen.append((threading.get_ident(), is_scripts())), called.set()))
    member.store.set("waiting", "1")
    assert called.wait(30)
    if member.rank == 1:
        member.store.wait(["done"], TIMEOUT)
        return None
    member.registry.begin_step()
    x = torch.ones(2, requires_grad=True)
    with later(0.2, member.registry.abort):
        raised = in_thread(lambda: Reduced.apply(x).sum().backward())
    member.store.set("done", "1")
    (thread, scripts), *_ = seen
    return raised, member.registry.step_failed, thread != threading.get_ident(), scripts


def test_a_backward_and_a_callback_belong_to_the_step_whatever_their_thread(make_world):
    assert make_world(2).run(is_cut_in_parts_of_a_step)[0] == (None, True, True, False)


def marks(member):
    member.start(timeout=LONG)
    member.registry.begin_step(5)
    in_thread(lambda: dist.all_reduce(torch.ones(64)))
    open_still = member.registry.marks.open
    dist.all_reduce(torch.ones(64))
    return open_still, member.registry.marks.open


def test_a_thread_gives_no_step_its_mark(make_world):
    assert make_world(2).run(marks) == [(True, False)] * 2
