"""Cases: works, coalesced collectives, shapes, point to point, objects, barriers, groups."""

from datetime import timedelta

import torch
import torch.distributed as dist
from collective_kit import blank, case, mine
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

LATE_S = 10.0


# --- how a collective is waited for ----------------------------------------------------------------------------------


@case("works", "wait, is_completed, is_success, result")
def work_life(rank, size):
    x = mine(rank, 3)
    work = dist.all_reduce(x, async_op=True)
    waited = work.wait()
    return waited, work.is_completed(), work.is_success(), work.result(), x


@case("works", "future with then")
def future_then(rank, size):
    x = mine(rank, 3)
    return dist.all_reduce(x, async_op=True).get_future().then(lambda f: [t + 1 for t in f.value()]).wait(), x


@case("works", "many in flight, waited for backwards")
def many(rank, size):
    xs = [mine(rank + n, n + 1) for n in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in reversed(works):
        work.wait()
    return xs


@case("works", "waited for twice, and by a second thread's future")
def twice(rank, size):
    x = mine(rank, 3)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    return work.wait(), work.wait(), future.wait(), x


@case("works", "wait with a time-out that is long enough")
def wait_in_time(rank, size):
    x = mine(rank, 3)
    return dist.all_reduce(x, async_op=True).wait(timedelta(seconds=LATE_S)), x


@case("works", "no wait before a barrier")
def not_waited_for(rank, size):
    x = mine(rank, 3)
    work = dist.all_reduce(x, async_op=True)
    dist.barrier()
    work.wait()
    return x


# --- coalesced -------------------------------------------------------------------------------------------------------


@case("coalesced")
def all_reduce_coalesced(rank, size):
    xs = [mine(rank, 3), mine(rank, 2, 2), mine(rank, 0)]
    dist.all_reduce_coalesced(xs)
    ys = [mine(rank, 3), mine(rank, 4)]
    dist.all_reduce_coalesced(ys, op=dist.ReduceOp.MAX, async_op=True).wait()
    return xs, ys


@case("coalesced")
def all_gather_coalesced(rank, size):
    outs = [[blank(3), blank(2)] for _ in range(size)]
    dist.all_gather_coalesced(outs, [mine(rank, 3), mine(rank, 2)])
    return outs


@case("coalesced", "_coalescing_manager with all_reduce, synchronous and asynchronous")
def manager_all_reduce(rank, size):
    xs = [mine(rank, 3), mine(rank, 2, 2)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    return xs


@case("coalesced", "_coalescing_manager with all_gather_into_tensor")
def manager_all_gather(rank, size):
    outs = [blank(size * 3), blank(size * 2)]
    with dist._coalescing_manager():
        for out in outs:
            dist.all_gather_into_tensor(out, mine(rank, out.numel() // size))
    return outs


@case("coalesced", "_coalescing_manager with reduce_scatter_tensor")
def manager_reduce_scatter(rank, size):
    outs = [blank(3), blank(2)]
    with dist._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, mine(rank, size * out.numel()))
    return outs


# --- uneven, strided, sparse -----------------------------------------------------------------------------------------


@case("objects", "set_model_state_dict, from rank 0")
def loads_state(rank, size):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(rank + 1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, model.state_dict() if rank == 0 else {}, options=options)
    return model.weight.detach()


if hasattr(dist, "gather_single"):  # torch 2.14 and later

    @case("shapes", "gather_single, to rank 0 and to rank 1")
    def gathers_single(rank, size):
        found = []
        for root in range(2):
            out = torch.full((size * 3,), -1.0) if rank == root else None
            dist.gather_single(mine(rank, 3), out, dst=root)
            found.append(out)
        return found

    @case("works", "gather_into_tensor, asynchronous")
    def gathers_later(rank, size):
        out = torch.full((size, 3), -1.0) if rank == 0 else None
        dist.gather_into_tensor(mine(rank, 3), out, async_op=True).wait()
        return out


@case("shapes", "all_to_all_single with splits, zero ones too")
def ragged(rank, size):
    sends = [(rank + r) % size for r in range(size)]
    receives = [(r + rank) % size for r in range(size)]
    out = blank(sum(receives))
    dist.all_to_all_single(out, mine(rank, sum(sends)), receives, sends)
    return out


@case("shapes", "all_to_all with lists of other sizes")
def ragged_lists(rank, size):
    outs = [blank(r + 1) for r in range(size)]
    dist.all_to_all(outs, [mine(rank, rank + 1) for _ in range(size)])
    return outs


@case("shapes", "all_gather of other sizes on each rank")
def uneven_all_gather(rank, size):
    outs = [blank(r + 1) for r in range(size)]
    dist.all_gather(outs, mine(rank, rank + 1))
    return outs


@case("shapes", "sparse all_reduce")
def sparse(rank, size):
    x = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return work.result()


@case("shapes", "all_gather into a stacked and a concatenated tensor")
def stacked(rank, size):
    stack, flat = blank(size, 2, 3), blank(size * 2, 3)
    dist.all_gather_into_tensor(stack, mine(rank, 2, 3))
    dist.all_gather_into_tensor(flat, mine(rank, 2, 3))
    return stack, flat


@case("shapes", "a view of a larger tensor")
def view(rank, size):
    x = mine(rank, 4, 3)
    dist.all_reduce(x[1:3])
    return x


# --- from one to one -------------------------------------------------------------------------------------------------


@case("point to point", "send and recv, with tags out of order")
def tags(rank, size):
    first, second = blank(3), blank(3)
    if rank == 0:
        works = [dist.isend(mine(n, 3), 1, tag=n) for n in (4, 5)]
        for work in works:
            work.wait()
    elif rank == 1:
        source = [dist.recv(second, 0, tag=5), dist.recv(first, 0, tag=4)]
        return source, first, second
    return None


@case("point to point", "recv from any rank")
def any_source(rank, size):
    senders = []
    if rank == 0:
        senders = sorted(dist.recv(blank(2)) for _ in range(size - 1))
    else:
        dist.send(mine(rank, 2), 0)
    dist.barrier()
    return senders


@case("point to point", "irecv from any rank tells the source")
def any_source_async(rank, size):
    out = blank(2)
    if rank == 0:
        work = dist.irecv(out)
        work.wait()
        return out, work._source_rank()
    if rank == 1:
        dist.send(mine(rank, 2), 0)
    return None


@case("point to point", "batch_isend_irecv as a ring")
def ring(rank, size):
    out = blank(4)
    ops = [
        dist.P2POp(dist.isend, mine(rank, 4), (rank + 1) % size),
        dist.P2POp(dist.irecv, out, (rank - 1) % size),
    ]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    return len(works), out


@case("point to point", "batch_isend_irecv both ways with tags, bfloat16 and complex")
def both_ways(rank, size):
    other = rank ^ 1
    if other >= size:
        return None
    outs = [blank(3, dtype=torch.bfloat16), blank(3, dtype=torch.complex64)]
    ops = [dist.P2POp(dist.isend, mine(rank, 3, dtype=out.dtype), other, tag=n) for n, out in enumerate(outs)]
    ops += [dist.P2POp(dist.irecv, out, other, tag=n) for n, out in enumerate(outs)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return outs


@case("point to point", "group_src and group_dst in a sub-group")
def in_sub_group(rank, size):
    group = dist.new_group([0, size - 1])
    out = blank(2)
    if rank == 0:
        dist.send(mine(0, 2), group=group, group_dst=1)
    elif rank == size - 1:
        dist.recv(out, group=group, group_src=0)
    return out


# --- objects ---------------------------------------------------------------------------------------------------------


@case("objects", "broadcast_object_list")
def broadcast_objects(rank, size):
    objects = [{"from": rank}, "x" * rank, None]
    dist.broadcast_object_list(objects, src=1)
    return objects


@case("objects", "all_gather_object")
def gather_all_objects(rank, size):
    out = [None] * size
    dist.all_gather_object(out, {"r": rank, "long": "y" * 1000 * rank})
    return out


@case("objects", "gather_object and scatter_object_list")
def gather_and_scatter_objects(rank, size):
    out = [None] * size if rank == 0 else None
    dist.gather_object(("r", rank), out, dst=0)
    part = [None]
    dist.scatter_object_list(part, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    return out, part


@case("objects", "send_object_list and recv_object_list")
def object_to_one(rank, size):
    if rank == 0:
        dist.send_object_list(["a", 7], dst=1)
    elif rank == 1:
        got = [None, None]
        source = dist.recv_object_list(got, src=0)
        return source, got
    return None


@case("objects", "tensors within")
def object_of_tensors(rank, size):
    out = [None] * size
    dist.all_gather_object(out, mine(rank, 3, dtype=torch.bfloat16))
    return out


# --- barriers --------------------------------------------------------------------------------------------------------


@case("barriers", "barrier, synchronous and asynchronous")
def barriers(rank, size):
    dist.barrier()
    return dist.barrier(async_op=True).wait()


@case("barriers", "monitored_barrier, and with wait_all_ranks")
def monitored(rank, size):
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=LATE_S), wait_all_ranks=True)
    return "all came"


# --- groups ----------------------------------------------------------------------------------------------------------


@case("groups", "new_group: order of ranks, members and others")
def new_groups(rank, size):
    group = dist.new_group([size - 1, 0])
    x = mine(rank, 3)
    if dist.get_rank(group) >= 0:
        dist.all_reduce(x, group=group)
        return x, dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
    return group == dist.GroupMember.NON_GROUP_MEMBER


@case("groups", "new_group of one")
def group_of_one(rank, size):
    groups = [dist.new_group([r]) for r in range(size)]
    x, out = mine(rank, 3), blank(3)
    dist.all_reduce(x, group=groups[rank])
    dist.all_gather_into_tensor(out, x, group=groups[rank])
    dist.barrier(groups[rank])
    return x, out


@case("groups", "new_group with use_local_synchronization")
def local_group(rank, size):
    if size > 2:
        return None  # plain torch 2.13 hangs here after another group was made
    group = dist.new_group([0, 1], use_local_synchronization=True)
    x = mine(rank, 3)
    dist.all_reduce(x, group=group)
    return x


@case("groups", "new_subgroups_by_enumeration")
def enumerated(rank, size):
    group, groups = dist.new_subgroups_by_enumeration([[r] for r in range(size - 2)] + [[size - 2, size - 1]])
    x = mine(rank, 3)
    dist.all_reduce(x, group=group)
    return x, len(groups)


@case("groups", "split_group")
def split(rank, size):
    group = dist.split_group(split_ranks=[[0, 1]] + [[r] for r in range(2, size)])
    x = mine(rank, 3)
    dist.all_reduce(x, group=group)
    return x, dist.get_process_group_ranks(group)


if torch.__version__ >= "2.15":  # earlier ones split no groups of Gloo

    @case("groups", "split_group: another order, a group of its own parent, a rank in no part")
    def split_again(rank, size):
        group = dist.split_group(split_ranks=[[1, 0]] + [[r] for r in range(2, size)], group_desc="parts")
        x = mine(rank, 3)
        dist.broadcast(x, group=group, group_src=0)
        alone = dist.split_group(split_ranks=[[0]])
        later = dist.new_group([0, 1])
        # torch counts the groups of each rank to name the next: with a third rank, names would differ from here on.
        if size == 2:
            part = dist.split_group(later, [[0], [1]])
            dist.all_reduce(x, group=part)
        places = dist.get_process_group_ranks(group), dist.get_rank(group), group.group_desc
        return x, places, alone is dist.GroupMember.NON_GROUP_MEMBER


@case("groups", "names, sizes, ranks and global ranks")
def told(rank, size):
    group = dist.new_group([0, 1], group_desc="two")
    if rank > 1:
        return None
    world = dist.group.WORLD
    return (
        (world.size(), world.rank(), dist.get_global_rank(group, 1), dist.get_group_rank(group, 1)),
        (group.size(), group.rank(), group.group_desc, dist.get_node_local_rank(fallback_rank=0)),
        (dist.is_gloo_available(), world.bound_device_id, dist.get_pg_count() > 1),
    )


@case("groups", "get_backend")
def backend_name(rank, size):
    group = dist.new_group(list(range(size)))
    return dist.get_backend(), dist.get_backend(group), dist.get_backend() is dist.Backend.GLOO


@case("groups", "destroyed, then made again")
def destroyed(rank, size):
    found = []
    for _ in range(2):
        group = dist.new_group(list(range(size)))
        x = mine(rank, 3)
        dist.all_reduce(x, group=group)
        found.append(x)
        dist.destroy_process_group(group)
    return found


@case("groups", "two groups of the same ranks, used alternately")
def alternately(rank, size):
    one, other = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
    x, y = mine(rank, 3), mine(rank, 4)
    for _ in range(3):
        works = [dist.all_reduce(x, group=one, async_op=True), dist.all_reduce(y, group=other, async_op=True)]
        for work in works:
            work.wait()
    return x, y
