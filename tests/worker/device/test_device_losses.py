"""Failures on a device: errors of the library and of the script, aborts, graphs, and steps that had not ended."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from device_kit import Device, reduced, run
from kit.device.fake_streams import FakeEvent, FakeStream
from kit.world import TIMEOUT
from torch.utils._python_dispatch import TorchDispatchMode

from deadpool_run.errors import AttachError, PeerLostError, ScriptError
from deadpool_run.worker.groups.collectives import COLLECTIVES, answer
from deadpool_run.worker.groups.registry import GroupState
from deadpool_run.worker.loop.repair import RepairParticipant


def finds_an_error(member, kind):
    device = Device(kind, member)
    member.start()
    reduced(device)
    member.meet("ready")
    member.registry.begin_step()
    assert not member.registry.find_failure()
    device.fake.communicators[0].fail("COMM_ERROR")
    dist.all_reduce(device.full(1), async_op=True)
    assert member.registry.find_failure()
    assert member.registry.find_failure(), "its groups are aborted"
    assert (member.registry.state, member.registry.intact) == (GroupState.ABORTED, False)
    assert member.registry.step_failed
    member.meet("found")
    member.registry.attach(member.store, "e2", TIMEOUT)
    assert member.registry.intact
    got = reduced(device)
    device.check()
    member.registry.shut_down()
    return member.failures, got


def test_an_error_that_the_library_finds_by_itself_starts_a_repair(make_world):
    for failures, got in run(make_world, "fake", finds_an_error):
        assert failures == ["fake reports COMM_ERROR of the group '0'"]
        assert got == [2.0] * 4


def waits_after_an_error(member, kind):
    device = Device(kind, member)
    member.start()
    reduced(device)
    member.registry.begin_step()
    member.meet("ready")
    work = dist.all_reduce(device.full(1), async_op=True)
    device.fake.communicators[0].fail("COMM_ERROR")
    work.wait()
    state, failed = member.registry.state, member.registry.step_failed
    member.meet("waited")
    device.check()
    return state is GroupState.ABORTED, failed, member.failures


def test_a_wait_after_an_error_of_the_library_starts_a_repair(make_world):
    """The error may be seen in a wait before anything asks for it."""
    assert run(make_world, "fake", waits_after_an_error) == [(True, True, ["allreduce: NCCL operation failed"])] * 2


def errs(member, kind, text):
    """Return how often the collective ran, what it raised, and whether the groups are aborted."""
    device = Device(kind, member)
    member.start()
    member.registry.begin_step()

    def refuse():
        device.fake.inside = lambda: None
        raise dist.DistBackendError(text)

    device.fake.inside = refuse
    try:
        reduced(device)
    except dist.DistBackendError as error:
        raised = str(error)
    else:
        raised = ""
    state, failed = member.registry.state, member.registry.step_failed
    member.meet("over")
    device.check()
    return raised, state is GroupState.ABORTED, failed, bool(member.failures)


def test_an_error_of_the_script_is_raised_and_one_of_a_peer_starts_a_repair(make_world):
    invalid = (
        "NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.30.7"
    )
    remote = "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.30.7"
    assert run(make_world, "fake", errs, invalid) == [(invalid, False, False, False)] * 2
    assert run(make_world, "fake", errs, remote) == [("", True, True, True)] * 2


def is_aborted_in_a_thread(member, kind):
    """Rank 1 takes no part in what a thread of rank 0 does in the end."""
    device = Device(kind, member)
    member.start()
    whole, cut = ThreadPoolExecutor(1).submit(reduced, device).result(), None
    if member.rank == 0:
        issued = threading.Event()
        device.fake.inside = issued.set
        lost = ThreadPoolExecutor(1).submit(reduced, device)
        assert issued.wait(30)
        member.registry.abort()
        cut = type(lost.exception())
    member.meet("over")
    device.check()
    return whole, cut


def test_an_abort_gives_a_thread_of_the_script_no_garbage(make_world):
    assert run(make_world, "fake", is_aborted_in_a_thread) == [([2.0] * 4, PeerLostError), ([2.0] * 4, None)]


def coalesces_in_an_old_thread(member, kind):
    device = Device(kind, member)
    member.start()
    reduced(device)
    go_on, told = threading.Event(), []

    def scripts():
        assert go_on.wait(30)
        try:
            with dist.distributed_c10d._coalescing_manager(dist.group.WORLD, device.place):
                dist.isend(device.full(1), 1 - member.rank)
        except PeerLostError as error:
            told.append("since before" in str(error))

    thread = threading.Thread(target=scripts)
    thread.start()
    member.registry.abort()
    member.registry.attach(member.store, "e2", TIMEOUT)
    go_on.set()
    thread.join()
    got = reduced(device)  # torch would collect it if it still saw a coalescing of the group
    device.check()
    return told, got, device.fake.depth


def test_an_old_thread_starts_no_coalescing(make_world):
    assert run(make_world, "fake", coalesces_in_an_old_thread) == [([True], [2.0] * 4, 0)] * 2


def fails_to_abort(member, kind):
    device = Device(kind, member)
    member.start()
    dist.new_group([0, 1])

    def fail(communicator):
        if communicator is first:
            raise RuntimeError("unhandled cuda error")

    first, second = device.fake.communicators
    device.fake.aborting = fail
    member.registry.abort()
    with pytest.raises(AttachError, match="the abort of a communicator failed: unhandled cuda error"):
        member.registry.attach(member.store, "e2", TIMEOUT)
    assert second.aborted.is_set()
    device.check()
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_abort_that_fails_keeps_a_rank_from_attaching(make_world):
    assert all(run(make_world, "fake", fails_to_abort))


def creating(member, kind):
    """Lose a peer while a communicator is created, which may take seconds: CUDA makes its context then."""
    device = Device(kind, member)
    member.start()
    registry = member.registry
    registry.abort()
    creates, lost, was_free = threading.Event(), threading.Event(), []

    def create():
        creates.set()
        was_free.append(lost.wait(20))

    device.fake.slow_create = create

    def lose():
        creates.wait(20)
        member.meet("creating")  # an abort would cut a connection that the peer still makes
        registry.abort()
        lost.set()  # after the abort: it must not wait for the communicator

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(AttachError, match="lost while"):
        registry.attach(member.store, "e2", TIMEOUT)
    thread.join()
    member.meet("freed")
    device.fake.slow_create = lambda: None
    registry.attach(member.store, "e3", TIMEOUT)
    got = reduced(device)
    device.check()
    registry.shut_down()
    return was_free, got


def test_a_loss_frees_a_rank_that_creates_a_communicator(make_world):
    assert run(make_world, "fake", creating) == [([True], [2.0] * 4)] * 2


def captures(member, kind):
    device = Device(kind, member)
    member.start()
    device.fake.capturing = True
    with pytest.raises(ScriptError, match="captured"):
        dist.all_reduce(device.full(1))
    device.fake.capturing = False
    member.registry.abort()
    member.registry.attach(member.store, "e2", TIMEOUT)
    got = reduced(device)
    member.registry.shut_down()
    return got


def test_a_collective_in_a_captured_graph_is_refused(make_world):
    assert run(make_world, "fake", captures) == [[2.0] * 4] * 2


def unended(member, kind):
    """Return the version that a survivor reports as held by its live objects: after a loss with a step that runs, and without."""
    device = Device(kind, member)
    member.start()
    held, reported = FakeEvent(), []

    def negotiate(_epoch, *, has_state):
        assert has_state
        reported.append(participant._live)

    orders = SimpleNamespace(wait_newer=lambda epoch: epoch + 1)
    participant = SimpleNamespace(
        registry=member.registry,
        _rank_entry=SimpleNamespace(phase=None),
        _link=SimpleNamespace(orders=orders),
        _epoch=1,
        _negotiate=negotiate,
    )
    device.fake.current = FakeStream("current")
    for epoch, ended in (("e2", False), ("e3", True)):
        device.fake.current.wait_event(held)
        if ended:
            held.record()
        member.registry.run_ahead.end_step(now=ended)
        participant._live = 7
        member.registry.abort()
        RepairParticipant.repair(participant)
        held.record()
        member.registry.attach(member.store, epoch, TIMEOUT)
    device.check()
    member.registry.shut_down()
    return reported


def test_weights_of_a_step_that_the_device_had_not_ended_are_not_kept(make_world):
    assert run(make_world, "fake", unended) == [[None, 7]] * 2


class _Largest(TorchDispatchMode):
    """Notes the most elements that an operation allocates for its result."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("name", ["_allgather_base", "gather_single", "allgather_into_tensor_coalesced"])
def test_a_fake_gather_makes_no_second_output(name):
    """An unsharded FSDP2 group may take most of a GPU's memory."""
    collective = next(each for each in COLLECTIVES if each.name == name)
    output, source = torch.zeros(8 * 16), torch.arange(16.0)
    coalesced = "coalesced" in name
    parts = ([output], [source]) if coalesced else (output, source)
    with _Largest() as largest:
        answer(collective, parts, 0, 8)
    assert output.tolist() == list(range(16)) * 8
    assert largest.most <= source.numel()
