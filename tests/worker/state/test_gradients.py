"""Gradients that are state come back to where they were: into a bucket of DDP's, or apart from it."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from snapshot_kit import given, in_child
from torch.nn.parallel import DistributedDataParallel

STEPS_PER_UPDATE = 3


def accumulating(gift, to_none, until, rewound):
    """Train until a version, run one step more, and go back; return where gradients were, and where they are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(3, 2), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(index):
        last = index % STEPS_PER_UPDATE == STEPS_PER_UPDATE - 1
        with contextlib.nullcontext() if last else model.no_sync():
            model(torch.full((4, 3), float(index))).sum().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

    def gradients():
        return [(each.grad._is_view(), each.grad.tolist()) for each in model.parameters()]

    _, snapshots = given(gift, wrappers=[model], protect={"model": model, "optimizer": optimizer})
    for index in range(until):
        step(index)
    snapshots.capture_now(until)
    before = gradients()
    step(until)
    (snapshots.rewind if rewound else snapshots.restore)(until)
    after = gradients()
    snapshots.close()
    dist.destroy_process_group()
    return before, after


@pytest.mark.parametrize(("until", "rewound"), [(4, False), (4, True), (5, False), (8, False)])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_comes_back_to_where_it_was(slots, to_none, until, rewound):
    before, after = in_child(accumulating, slots.gift(), to_none, until, rewound)
    assert after == before
    assert [in_bucket for in_bucket, _ in before] == [not to_none] * 2
