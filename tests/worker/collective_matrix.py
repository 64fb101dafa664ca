"""Every collective with every dtype, shape and way to wait; every reduction with every dtype."""

import torch
import torch.distributed as dist
from collective_kit import blank, mine, outcome

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn),
)
SHAPES = {"scalar": (), "empty": (0,), "vector": (5,), "matrix": (3, 4), "large": (70_001,)}


def _all_reduce(rank, size, shape, dtype, wait):
    x = mine(rank, *shape, dtype=dtype)
    wait(dist.all_reduce(x, op=dist.ReduceOp.MAX if dtype is torch.bool else dist.ReduceOp.SUM, async_op=True))
    return x


def _reduce(rank, size, shape, dtype, wait):
    x = mine(rank, *shape, dtype=dtype)
    wait(dist.reduce(x, dst=size - 1, async_op=True))
    return x if rank == size - 1 else None


def _broadcast(rank, size, shape, dtype, wait):
    x = mine(rank, *shape, dtype=dtype)
    wait(dist.broadcast(x, src=1, async_op=True))
    return x


def _all_gather(rank, size, shape, dtype, wait):
    outs = [blank(*shape, dtype=dtype) for _ in range(size)]
    wait(dist.all_gather(outs, mine(rank, *shape, dtype=dtype), async_op=True))
    return outs


def _all_gather_into_tensor(rank, size, shape, dtype, wait):
    shape = shape or (1,)
    out = blank(size * shape[0], *shape[1:], dtype=dtype)
    wait(dist.all_gather_into_tensor(out, mine(rank, *shape, dtype=dtype), async_op=True))
    return out


def _gather(rank, size, shape, dtype, wait):
    outs = [blank(*shape, dtype=dtype) for _ in range(size)] if rank == 0 else None
    wait(dist.gather(mine(rank, *shape, dtype=dtype), outs, dst=0, async_op=True))
    return outs


def _scatter(rank, size, shape, dtype, wait):
    out = blank(*shape, dtype=dtype)
    parts = [mine(r + 5, *shape, dtype=dtype) for r in range(size)] if rank == 1 else None
    wait(dist.scatter(out, parts, src=1, async_op=True))
    return out


def _reduce_scatter(rank, size, shape, dtype, wait):
    out = blank(*shape, dtype=dtype)
    wait(dist.reduce_scatter(out, [mine(rank + r, *shape, dtype=dtype) for r in range(size)], async_op=True))
    return out


def _reduce_scatter_tensor(rank, size, shape, dtype, wait):
    shape = shape or (1,)  # a scalar ends the process, in Gloo
    out = blank(*shape, dtype=dtype)
    wait(dist.reduce_scatter_tensor(out, mine(rank, size * shape[0], *shape[1:], dtype=dtype), async_op=True))
    return out


def _all_to_all(rank, size, shape, dtype, wait):
    outs = [blank(*shape, dtype=dtype) for _ in range(size)]
    wait(dist.all_to_all(outs, [mine(rank + r, *shape, dtype=dtype) for r in range(size)], async_op=True))
    return outs


def _all_to_all_single(rank, size, shape, dtype, wait):
    out = blank(size, *shape, dtype=dtype)
    wait(dist.all_to_all_single(out, mine(rank, size, *shape, dtype=dtype), async_op=True))
    return out


def _send_and_recv(rank, size, shape, dtype, wait):
    out = blank(*shape, dtype=dtype)
    if rank == 0:
        wait(dist.isend(mine(rank, *shape, dtype=dtype), 1, tag=3))
    elif rank == 1:
        wait(dist.irecv(out, 0, tag=3))
    return out


MATRIX = {
    function.__name__.strip("_"): function
    for function in (
        *(_all_reduce, _reduce, _broadcast, _all_gather, _all_gather_into_tensor, _gather, _scatter),
        *(_reduce_scatter, _reduce_scatter_tensor, _all_to_all, _all_to_all_single, _send_and_recv),
    )
}

WAITS = {
    "wait": lambda work: work.wait(),
    "future": lambda work: work.get_future().wait(),
}


def matrix_outcomes(rank, size):
    """Outcome of each collective with each dtype, shape and way to wait."""
    return {
        (name, str(dtype).removeprefix("torch."), shape, way): outcome(
            lambda: function(rank, size, SHAPES[shape], dtype, wait)  # noqa: B023 - called at once
        )
        for name, function in MATRIX.items()
        for dtype in DTYPES
        for shape in SHAPES
        for way, wait in WAITS.items()
        if not (name == "send_and_recv" and way == "future")  # Gloo has none of these
        if not (shape == "large" and way == "future")
    }


REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG", "PREMUL_SUM")


def reduction_outcomes(rank, size):
    """Outcome of each reduction with each dtype in the three collectives that reduce."""
    found = {}
    for op_name in REDUCTIONS:
        op = dist._make_nccl_premul_sum(2.0) if op_name == "PREMUL_SUM" else getattr(dist.ReduceOp, op_name)
        for dtype in DTYPES:

            def all_reduce(op=op, dtype=dtype):
                x = mine(rank, 5, dtype=dtype)
                dist.all_reduce(x, op=op)
                return x

            def reduce(op=op, dtype=dtype):
                x = mine(rank, 5, dtype=dtype)
                dist.reduce(x, 1, op=op)
                return x if rank == 1 else None

            def reduce_scatter(op=op, dtype=dtype):
                out = blank(3, dtype=dtype)
                dist.reduce_scatter_tensor(out, mine(rank, size * 3, dtype=dtype), op=op)
                return out

            for function in (all_reduce, reduce, reduce_scatter):
                found[op_name, str(dtype).removeprefix("torch."), function.__name__] = outcome(function)
    return found


def outcomes(rank, size):
    """Return both."""
    return {**matrix_outcomes(rank, size), **reduction_outcomes(rank, size)}
