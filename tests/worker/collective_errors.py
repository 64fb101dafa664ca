"""Cases: mistakes of a script."""

from datetime import timedelta

import torch
import torch.distributed as dist
from collective_kit import blank, case, mine, outcome

SHORT = timedelta(milliseconds=60)


def mistake(name):
    return case("errors", name)


@mistake("no tensor")
def no_tensor(rank, size):
    dist.all_reduce([1, 2])


@mistake("a tensor on meta")
def on_meta(rank, size):
    dist.all_reduce(torch.ones(2, device="meta"))


@mistake("a tensor that is not contiguous: all_reduce")
def strided(rank, size):
    x = mine(rank, 4, 3).t()
    dist.all_reduce(x)
    return x


@mistake("a tensor that is not contiguous: send")
def strided_send(rank, size):
    if rank == 0:
        dist.send(mine(rank, 4, 3).t(), 1)


@mistake("an operation that Gloo lacks, seen by wait")
def no_operation(rank, size):
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)


@mistake("an operation that Gloo lacks, seen by a future")
def no_operation_future(rank, size):
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND, async_op=True).get_future().wait()


@mistake("an operation that Gloo lacks, seen by exception()")
def no_operation_asked(rank, size):
    work = dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND, async_op=True)
    raised = outcome(work.wait)
    return raised, work.is_completed(), work.is_success(), work.exception() is not None


@mistake("all_gather: too few outputs")
def few_outputs(rank, size):
    dist.all_gather([blank(3)] * (size - 1), mine(rank, 3))


@mistake("all_gather: an output of another dtype")
def other_dtype(rank, size):
    dist.all_gather([blank(3, dtype=torch.int32)] * size, mine(rank, 3))


@mistake("all_gather: outputs of another size")
def other_size(rank, size):
    dist.all_gather([blank(2)] * size, mine(rank, 3))


@mistake("all_gather_into_tensor: an output too small")
def small_output(rank, size):
    dist.all_gather_into_tensor(blank(size), mine(rank, 3))


@mistake("all_gather_into_tensor: an output of another dtype")
def flat_dtype(rank, size):
    dist.all_gather_into_tensor(blank(3 * size, dtype=torch.float64), mine(rank, 3))


@mistake("reduce_scatter: too few inputs")
def few_inputs(rank, size):
    dist.reduce_scatter(blank(3), [mine(rank, 3)] * (size - 1))


@mistake("all_to_all_single: splits that do not add up")
def bad_splits(rank, size):
    dist.all_to_all_single(blank(size), mine(rank, size), [2] * size, [1] * size)


@mistake("all_to_all_single: an input that cannot be divided")
def bad_division(rank, size):
    dist.all_to_all_single(blank(size + 1), mine(rank, size + 1))


@mistake("all_to_all: lists of different dtypes")
def mixed_lists(rank, size):
    dist.all_to_all([blank(2, dtype=torch.int32)] * size, [mine(rank, 2)] * size)


@mistake("broadcast: a source that is not there")
def no_source(rank, size):
    dist.broadcast(mine(rank, 2), src=9)


@mistake("broadcast: a source below zero")
def negative_source(rank, size):
    dist.broadcast(mine(rank, 2), src=-1)


@mistake("broadcast: src and group_src together")
def two_sources(rank, size):
    dist.broadcast(mine(rank, 2), src=0, group_src=0)


@mistake("reduce: a destination that is not there")
def no_destination(rank, size):
    dist.reduce(mine(rank, 2), dst=9)


@mistake("gather: a list where there must be none")
def unwanted_list(rank, size):
    if rank == 1:
        dist.gather(mine(rank, 2), [blank(2)] * size, dst=0)


@mistake("gather: no list at the destination")
def no_list(rank, size):
    if rank == 0:
        dist.gather(mine(rank, 2), dst=0)


@mistake("scatter: no list at the source")
def nothing_to_scatter(rank, size):
    if rank == 0:
        dist.scatter(blank(2), src=0)


@mistake("scatter: parts of another size")
def other_parts(rank, size):
    if rank == 0:
        dist.scatter(blank(2), [mine(rank, 3)] * size, src=0)


@mistake("send: to itself")
def to_itself(rank, size):
    dist.send(mine(rank, 2), rank)


@mistake("send: a tag below zero")
def bad_tag(rank, size):
    if rank == 0:
        dist.send(mine(rank, 2), 1, tag=-1)


@mistake("send: nothing said of whom")
def to_whom(rank, size):
    dist.isend(mine(rank, 2))


@mistake("batch_isend_irecv: an empty list")
def empty_batch(rank, size):
    return dist.batch_isend_irecv([])


@mistake("batch_isend_irecv: what is no operation")
def odd_batch(rank, size):
    dist.batch_isend_irecv([dist.all_reduce])


@mistake("P2POp: a function that is none of the two")
def odd_operation(rank, size):
    dist.P2POp(dist.all_reduce, mine(rank, 2), 1)


@mistake("objects: one that cannot be pickled")
def unpicklable(rank, size):
    dist.all_gather_object([None] * size, lambda: None)


@mistake("all_reduce_coalesced: different dtypes")
def mixed_coalesced(rank, size):
    dist.all_reduce_coalesced([mine(rank, 2), mine(rank, 2, dtype=torch.float64)])


@mistake("barrier: device_ids")
def device_ids(rank, size):
    dist.barrier(device_ids=[0])


@mistake("new_group: a rank that is not there")
def absent_rank(rank, size):
    dist.new_group([0, 9])


@mistake("new_group: more ranks than there are")
def too_many(rank, size):
    dist.new_group(list(range(size + 1)))


@mistake("new_group: a rank twice")
def same_rank(rank, size):
    dist.new_group([0, 0])


@mistake("new_group: a backend that is not there")
def odd_backend(rank, size):
    dist.new_group([0, 1], backend="carrier_pigeon")


@mistake("a group of which this rank is no member")
def foreign_group(rank, size):
    group = dist.new_group([0])
    x = mine(rank, 2)
    if rank == 1:
        return dist.all_reduce(x, group=group), outcome(lambda: dist.get_process_group_ranks(group)), x
    return None


@mistake("a group that was destroyed")
def after_the_end(rank, size):
    group = dist.new_group(list(range(size)))
    dist.destroy_process_group(group)
    x = mine(rank, 2)
    dist.all_reduce(x, group=group)
    return x


@mistake("a destination outside the group")
def outside(rank, size):
    group = dist.new_group([0])
    if rank == 0:
        dist.broadcast(mine(rank, 2), src=1, group=group)


@mistake("sparse tensors where Gloo takes none")
def sparse_broadcast(rank, size):
    dist.broadcast(torch.sparse_coo_tensor([[0]], [1.0], (2,)), 0)


@mistake("monitored_barrier: a rank that is late")
def late(rank, size):
    if size > 2:
        return None  # to a third rank it looks like the loss of a peer: it is one that a repair answers
    group = dist.new_group([0, 1])
    if rank == 1:
        dist.recv(torch.ones(1), 0)
        return None
    # Long enough to begin within it on a busy machine: torch names the late rank only then.
    raised = outcome(lambda: dist.monitored_barrier(group, timeout=10 * SHORT))
    dist.send(torch.ones(1), 1)
    return raised
