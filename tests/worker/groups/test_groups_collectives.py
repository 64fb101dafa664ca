"""Each collective on deadpool groups against the same on Gloo; faults that are the user's; rehearsal with a transcript."""

import gc
import math
import re
import weakref
from datetime import timedelta
from unittest import mock

import exercise
import pytest
import torch
import torch.distributed as dist
from kit.world import TIMEOUT

from deadpool_run.errors import RefusedError
from deadpool_run.worker.groups.registry import GroupState
from deadpool_run.worker.transcript.transcript import Transcript

SIZE = 4


def everything(member, backend):
    member.start(backend=backend)
    results = exercise.run_all(member.rank, member.size)
    if backend == "deadpool":
        assert not member.registry.step_failed
        assert not member.failures
        member.registry.shut_down()
    return results


def test_results_are_those_of_gloo(make_world):
    expected = make_world(SIZE).run(everything, "gloo")
    assert make_world(SIZE).run(everything, "deadpool") == expected


def record(member):
    member.registry.recording = Transcript()
    member.start()
    results = exercise.run_all(member.rank, member.size)
    return results, member.registry.recording.to_bytes()


def play(member, data):
    member.registry.playback = Transcript.from_bytes(data)
    member.start(attached=False)
    results = exercise.run_all(member.rank, member.size)
    assert member.registry.step_failed
    return results, member.registry.playback.misses


def test_a_rehearsal_with_the_transcript_sees_what_the_rank_saw(make_world):
    recorded = make_world(SIZE).run(record)
    for rank, (results, data) in enumerate(recorded):
        world = make_world(SIZE)
        played, misses = world.start(rank, play, data).result()
        assert misses == 0
        assert played == results


def asks_in_a_later_step(member):
    member.start(attached=False)
    member.registry.begin_step()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work.wait()
    member.registry.begin_step()
    with pytest.raises(RefusedError, match="allreduce: this collective was issued in an earlier step"):
        work.wait()
    with pytest.raises(RefusedError, match="allreduce: this collective was issued in an earlier step"):
        work.get_future()


def test_a_fake_result_is_refused_in_a_later_step(make_world):
    make_world(2).start(0, asks_in_a_later_step).result()


def rehearse(member):
    member.start(attached=False)
    return exercise.run_all(member.rank, member.size)


def numbers(value):
    if isinstance(value, list):
        return [n for part in value for n in numbers(part)]
    return [value] if isinstance(value, float) else []


def test_fake_answers_are_finite_and_the_same_each_time(make_world):
    first, second = (make_world(SIZE).start(2, rehearse).result() for _ in range(2))
    assert first == second
    assert all(math.isfinite(number) and abs(number) < 1e6 for number in numbers(list(first.values())))


def faults(member, backend):
    member.start(backend=backend)
    seen = []
    group = dist.group.WORLD

    def attempt(function):
        try:
            function()
        except Exception as error:  # noqa: BLE001 - the kind is what is compared
            seen.append((type(error).__name__, re.sub(r"[\d.]+", "#", str(error).split("\n")[0][:60])))
        else:
            seen.append(None)

    attempt(lambda: dist.all_reduce([1, 2]))
    attempt(lambda: dist.all_gather([torch.empty(3)] * member.size, torch.empty(4)))
    attempt(lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND))  # found by Gloo's thread: raised by the wait
    attempt(lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND, async_op=True).get_future().wait())
    attempt(lambda: dist.all_gather_into_tensor(torch.empty(7), torch.empty(3)))
    attempt(lambda: dist.broadcast(torch.ones(2), src=9))
    attempt(lambda: group.broadcast([torch.ones(2)], 1))
    attempt(lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(5)))
    attempt(lambda: dist.all_reduce(torch.ones(2, device="meta")))
    if backend == "deadpool":
        assert member.registry.state is GroupState.ATTACHED
        assert not member.registry.step_failed
        assert not member.failures
    return seen


def test_faults_of_the_user_are_raised_as_gloo_raises_them(make_world):
    expected = make_world(2).run(faults, "gloo")
    assert sum(fault is not None for fault in expected[0]) >= 8, expected
    assert make_world(2).run(faults, "deadpool") == expected


def forget_works(member):
    member.start()
    group = dist.group.WORLD
    seen = []
    for _ in range(20):
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        seen += [weakref.ref(tensor), weakref.ref(work)]
        future_of = dist.all_reduce(tensor, async_op=True)
        future_of.get_future()
        seen.append(weakref.ref(future_of))
        del tensor, work, future_of
    dist.barrier()
    group.inner.host.allreduce([torch.ones(1)]).wait()
    member.registry.shut_down()  # Gloo's queue holds works until its threads are done with them
    gc.collect()
    return [ref() is not None for ref in seen]


def test_works_that_nobody_waits_for_are_freed(make_world):
    assert not any(make_world(2).run(forget_works)[0])


def asks_for_gloo(member):
    member.start()
    kinds = [type(dist.new_group(backend=name)) for name in (None, "gloo", "cpu:gloo,cuda:nccl")]
    return [kind.__module__ for kind in kinds], len(member.registry.groups)


def test_groups_that_ask_for_gloo_are_protected_too(make_world):
    assert make_world(2).run(asks_for_gloo) == [(["deadpool_run.worker.groups.group"] * 3, 4)] * 2


def two_worlds(member):
    member.start()
    sums = []
    for number in range(3):
        x = torch.ones(1) * (member.rank + 1)
        dist.all_reduce(x)
        sums.append(x.item())
        dist.destroy_process_group()
        store = dist.PrefixStore(f"again{number}", member.store)
        dist.init_process_group("deadpool", store=store, rank=member.rank, world_size=member.size, timeout=TIMEOUT)
    sums.append(len(member.registry.groups))
    return sums


def test_a_script_may_destroy_its_world_and_make_another(make_world):
    assert make_world(2).run(two_worlds) == [[3.0, 3.0, 3.0, 1]] * 2


class Cell:
    issued = waited = 0


def counts(member):
    member.registry._rank_entry = Cell()
    member.start()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    seen = [(Cell.issued, Cell.waited), (member.registry._rank_entry.issued, member.registry._rank_entry.waited)]
    work.wait()
    work.wait()
    seen.append((member.registry._rank_entry.issued, member.registry._rank_entry.waited))
    return seen


def test_the_rank_entry_counts_what_is_issued_and_what_is_waited_for(make_world):
    assert make_world(2).run(counts) == [[(0, 0), (4, 3), (4, 4)]] * 2


def monitored(member):
    member.start()
    dist.monitored_barrier()
    if member.rank == 1:
        member.meet("late")
        return None
    with pytest.raises(RuntimeError, match="monitoredBarrier"):
        dist.monitored_barrier(timeout=timedelta(milliseconds=50))
    state = member.registry.state
    member.meet("late")
    return state is GroupState.ATTACHED


def test_monitored_barrier_reports_who_is_late(make_world):
    assert make_world(2).run(monitored)[0]


def says_what_carries(member):
    member.start()
    host, world = dist.new_group([0, 1], backend="gloo"), dist.group.WORLD
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        told = [
            [dist.get_backend(group), group.name(), [device.type for device in group._device_types]]
            for group in (world, host)
        ]
    member.registry.shut_down()
    return told


def test_a_group_for_cpu_tensors_says_gloo_on_a_machine_with_gpus(make_world):
    """A script that sends CUDA tensors over each group that says "nccl" would send them to a group of CPUs."""
    expected = [["nccl", "nccl", ["cpu", "cuda"]], ["gloo", "gloo", ["cpu"]]]
    assert make_world(2).run(says_what_carries) == [expected] * 2
