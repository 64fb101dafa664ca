"""Every way of communicating that torch.distributed offers on CPU, as named functions that return tensors or objects."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def mine(rank, *shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 10 * (rank + 1)


def blank(*shape):
    """Where a collective writes its result: NaN, as memory that nobody wrote may hold."""
    return torch.full(shape, float("nan"))


@case
def all_reduce(rank, size):
    x, y = mine(rank, 3), mine(rank, 4)
    dist.all_reduce(x)
    work = dist.all_reduce(y, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert work.is_completed()
    return x, y


@case
def all_reduce_future(rank, size):
    x = mine(rank, 3)
    return dist.all_reduce(x, async_op=True).get_future().then(lambda f: [t + 1 for t in f.value()]).wait(), x


@case
def all_reduce_coalesced(rank, size):
    xs = [mine(rank, 3), mine(rank, 2, 2)]
    dist.all_reduce_coalesced(xs)
    return xs


@case
def coalescing_manager(rank, size):
    xs = [mine(rank, 3), mine(rank, 2, 2)]
    with dist.distributed_c10d._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    outs = [blank(size * 3), blank(size * 2)]
    with dist.distributed_c10d._coalescing_manager():
        for out in outs:
            dist.all_gather_into_tensor(out, mine(rank, out.numel() // size))
    parts = [blank(3), blank(2)]
    with dist.distributed_c10d._coalescing_manager():
        for part in parts:
            dist.reduce_scatter_tensor(part, mine(rank, size * part.numel()))
    return xs, outs, parts


@case
def broadcast(rank, size):
    x = mine(rank, 3)
    dist.broadcast(x, src=1)
    return x


@case
def reduce(rank, size):
    x = mine(rank, 3)
    dist.reduce(x, dst=1)
    return x if rank == 1 else None


@case
def all_gather(rank, size):
    out = [blank(3) for _ in range(size)]
    dist.all_gather(out, mine(rank, 3))
    flat = blank(size * 3)
    dist.all_gather_into_tensor(flat, mine(rank, 3))
    return out, flat


@case
def gather_and_scatter(rank, size):
    out = [blank(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine(rank, 2), out, dst=0)
    part = blank(2)
    dist.scatter(part, [mine(r, 2) for r in range(size)] if rank == 1 else None, src=1)
    return out, part


@case
def reduce_scatter(rank, size):
    out = blank(2)
    dist.reduce_scatter_tensor(out, mine(rank, 2 * size))
    other = blank(2)
    dist.reduce_scatter(other, [mine(rank + r, 2) for r in range(size)])
    return out, other


@case
def all_to_all(rank, size):
    out = blank(size)
    dist.all_to_all_single(out, mine(rank, size))
    splits_in = [r + 1 for r in range(size)]
    ragged = blank(size * (rank + 1))
    dist.all_to_all_single(ragged, mine(rank, sum(splits_in)), [rank + 1] * size, splits_in)
    lists = [blank(2) for _ in range(size)]
    dist.all_to_all(lists, [mine(rank + r, 2) for r in range(size)])
    return out, ragged, lists


@case
def send_and_receive(rank, size):
    x = blank(3)
    if rank == 0:
        dist.send(mine(0, 3), 1)
        dist.isend(mine(0, 3), 2, tag=7).wait()
    elif rank == 1:
        assert dist.recv(x, 0) == 0
    elif rank == 2:
        work = dist.irecv(x, 0, tag=7)
        work.wait()
    dist.barrier()
    senders = None
    if rank == 0:
        senders = sorted(dist.recv(blank(2)) for _ in range(size - 1))
    if rank != 0:
        dist.send(mine(rank, 2), 0)
    dist.barrier()  # else a receive from any rank would take the next case's message
    if rank == 0:
        return senders
    return x if rank < 3 else None


@case
def ring(rank, size):
    got = blank(4)
    ops = [
        dist.P2POp(dist.isend, mine(rank, 4), (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


@case
def objects(rank, size):
    one = [{"from": rank, "x": [1, 2, 3]}]
    dist.broadcast_object_list(one, src=2)
    every = [None] * size
    dist.all_gather_object(every, ("r", rank))
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(str(rank), gathered, dst=0)
    scattered = [None]
    dist.scatter_object_list(scattered, list("abcdef"[:size]) if rank == 0 else None, src=0)
    return one, every, gathered, scattered


@case
def barriers(rank, size):
    dist.barrier()
    dist.barrier(async_op=True).wait()
    return []


@case
def sub_groups(rank, size):
    low, high = dist.new_group([0, 1], backend="gloo"), dist.new_group(list(range(2, size)))
    group = low if rank < 2 else high
    x = mine(rank, 3)
    dist.all_reduce(x, group=group)
    members = dist.get_process_group_ranks(group)
    other = high if rank < 2 else low
    assert other == dist.GroupMember.NON_GROUP_MEMBER
    dist.destroy_process_group(group)
    return x, members


@case
def functional(rank, size):
    world = dist.group.WORLD
    x = mine(rank, 2 * size)
    return (
        funcol.all_reduce(x, "sum", world).clone(),
        funcol.all_gather_tensor(x, 0, world).clone(),
        funcol.reduce_scatter_tensor(x, "sum", 0, world).clone(),
        funcol.all_to_all_single(x, None, None, world).clone(),
        funcol.broadcast(x, 1, world).clone(),
        [t.clone() for t in funcol.all_gather_into_tensor_coalesced([mine(rank, 2), mine(rank, 3)], world)],
        [t.clone() for t in funcol.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], world)],
        [t.clone() for t in funcol.all_reduce_coalesced([mine(rank, 2), mine(rank, 3)], "sum", world)],
    )


@case
def differentiable(rank, size):
    x = mine(rank, 3).requires_grad_()
    dist_nn.all_reduce(x * 2).sum().backward()
    return x.grad


@case
def mesh(rank, size):
    device_mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    x = mine(0, 4, 4)
    sharded = distribute_tensor(x, device_mesh["tp"], [Shard(0)])
    replicated = sharded.redistribute(placements=[Replicate()]).to_local()
    moved = sharded.redistribute(placements=[Shard(1)]).to_local()
    summed = DTensor.from_local(mine(rank, 2), device_mesh["dp"], [Shard(0)]).full_tensor()
    return sharded.to_local(), replicated, moved, summed


def run_all(rank, size):
    return {name: plain(function(rank, size)) for name, function in CASES.items()}


def plain(value):
    """Tensors as lists, so that results travel and compare."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value
