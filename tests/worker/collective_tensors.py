"""Cases: functional collectives, collectives with gradients, DTensor."""

# ruff: noqa: ARG005 - every case takes rank and size
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from collective_kit import blank, case, mine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

# --- functional ------------------------------------------------------------------------------------------------------


def done(value):
    """Wait for what a functional collective returned."""
    if isinstance(value, (list, tuple)):
        return [done(part) for part in value]
    return funcol.wait_tensor(value).clone()


FUNCTIONAL = {
    "all_reduce": lambda x, r, n, g: funcol.all_reduce(x, "sum", g),
    "all_reduce avg": lambda x, r, n, g: funcol.all_reduce(x, "avg", g),
    "all_reduce_inplace": lambda x, r, n, g: funcol.all_reduce_inplace(x, "max", g),
    "all_reduce_coalesced": lambda x, r, n, g: funcol.all_reduce_coalesced([x, x[:2] + 1], "sum", g),
    "broadcast": lambda x, r, n, g: funcol.broadcast(x, 1, g),
    "all_gather_tensor": lambda x, r, n, g: funcol.all_gather_tensor(x, 0, g),
    "all_gather_tensor along dimension 1": lambda x, r, n, g: funcol.all_gather_tensor(x.view(n, -1), 1, g),
    "all_gather_into_tensor_coalesced": lambda x, r, n, g: funcol.all_gather_into_tensor_coalesced([x, x + 1], g),
    "reduce_scatter_tensor": lambda x, r, n, g: funcol.reduce_scatter_tensor(x, "sum", 0, g),
    "reduce_scatter_tensor along dimension 1": lambda x, r, n, g: funcol.reduce_scatter_tensor(
        x.view(2, -1), "sum", 1, g
    ),
    "reduce_scatter_tensor_coalesced": lambda x, r, n, g: funcol.reduce_scatter_tensor_coalesced(
        [x, x + 1], "sum", [0, 0], g
    ),
    "all_to_all_single": lambda x, r, n, g: funcol.all_to_all_single(x, None, None, g),
    "permute_tensor": lambda x, r, n, g: funcol.permute_tensor(x, [(each + 1) % n for each in range(n)], g),
    "two in flight": lambda x, r, n, g: [funcol.all_reduce(x, "sum", g), funcol.all_reduce(x + 1, "sum", g)],
    "a result used without a wait": lambda x, r, n, g: funcol.all_reduce(x, "sum", g) * 2,
    "zero-sized": lambda x, r, n, g: funcol.all_gather_tensor(x[:0], 0, g),
    "complex64": lambda x, r, n, g: funcol.all_reduce(x.to(torch.complex64), "sum", g),
    "bfloat16": lambda x, r, n, g: funcol.reduce_scatter_tensor(x.to(torch.bfloat16), "sum", 0, g),
    "unknown reduction": lambda x, r, n, g: funcol.all_reduce(x, "mean", g),
}


def _functional(name, function):
    @case("functional", name)
    def run(rank, size):
        return done(function(mine(rank, 2 * size), rank, size, dist.group.WORLD))


for _name, _function in FUNCTIONAL.items():
    _functional(_name, _function)


@case("functional", "with gradients: all_gather_tensor, reduce_scatter_tensor, all_to_all_single")
def functional_gradients(rank, size):
    world, found = dist.group.WORLD, []
    for function in (
        lambda x: funcol.all_gather_tensor_autograd(x, 0, world),
        lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, world),
        lambda x: funcol.all_to_all_single_autograd(x, [2] * size, [2] * size, world),
    ):
        x = mine(rank, 2 * size).requires_grad_()
        y = function(x * 2)
        (y * (rank + 1)).sum().backward()
        found += [y.detach().clone(), x.grad]
    return found


@case("functional", "torch.distributed.nn: collectives with gradients")
def differentiable(rank, size):
    found = []
    for function in (
        dist_nn.all_reduce,
        lambda x: torch.stack(dist_nn.all_gather(x)),
        lambda x: dist_nn.broadcast(x, 1),
        lambda x: dist_nn.reduce(x, 0),
        lambda x: dist_nn.reduce_scatter(blank(2), list(x.chunk(size))),
        lambda x: torch.cat(list(dist_nn.all_to_all([blank(2) for _ in range(size)], list(x.chunk(size))))),
        lambda x: dist_nn.all_to_all_single(blank(2 * size), x),
    ):
        x = mine(rank, 2 * size).requires_grad_()
        y = function(x * 2)
        (y * (rank + 1)).sum().backward()
        found.append(x.grad)
    return found


# --- DTensor ---------------------------------------------------------------------------------------------------------


LAYOUTS = {
    "Shard(0)": Shard(0),
    "Shard(1)": Shard(1),
    "Replicate": Replicate(),
    "Partial sum": Partial(),
    "Partial max": Partial("max"),
    "Partial avg": Partial("avg"),
}


def _redistribution(name, source, target):
    @case("DTensor", name)
    def run(rank, size):
        mesh = init_device_mesh("cpu", (size,))
        found = []
        for shape in ((2 * size, 3 * size), (size + 1, 2 * size - 1), (1, 1)):  # even, uneven, most ranks empty
            if isinstance(source, Partial):
                start = DTensor.from_local(mine(rank, *shape), mesh, [source], run_check=False)
            else:
                start = distribute_tensor(mine(0, *shape), mesh, [source])
            found.append(start.redistribute(mesh, [target]).to_local())
        return found


for _from, _source in LAYOUTS.items():
    for _to, _target in LAYOUTS.items():
        if _from != _to and not isinstance(_target, Partial):
            _redistribution(f"{_from} to {_to}", _source, _target)


@case("DTensor", "full_tensor, complex and bfloat16")
def full_tensors(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    return [
        distribute_tensor(mine(0, size + 1, 2, dtype=dtype), mesh, [Shard(0)]).full_tensor()
        for dtype in (torch.complex64, torch.bfloat16)
    ]


@case("DTensor", "matrix product and its gradient, column- and row-wise")
def products(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    x = distribute_tensor(mine(0, 4, 2 * size), mesh, [Replicate()])
    weight = distribute_tensor(mine(1, 2 * size, 2 * size), mesh, [Shard(1)]).requires_grad_()
    out = distribute_tensor(mine(2, 2 * size, 3), mesh, [Shard(0)]).requires_grad_()
    y = ((x @ weight) @ out).full_tensor()
    y.sum().backward()
    return y, weight.grad.to_local(), out.grad.to_local()


@case("DTensor", "a mesh of two dimensions and its slices")
def two_dimensions(rank, size):
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    both = distribute_tensor(mine(0, 2, 2 * size), mesh, [Shard(0), Shard(1)])
    summed = DTensor.from_local(mine(rank, 2), mesh["tp"], [Partial()]).full_tensor()
    return both.full_tensor(), summed, mesh["dp"].size(), mesh.get_local_rank("tp")
