"""Tensors that differ between replicas without a loss: one rank learns them, all know them after a repair, and none forgets them."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.worker.state.protected import Protected
from deadpool_run.worker.verify.agreement import Agreement


def replicated(member):
    """Return a model under DDP, and what compares its replicas."""
    member.start()
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    protected = Protected()
    protected.add("model", model)
    return model, Agreement(protected)


def shares(member):
    model, agreement = replicated(member)
    with torch.no_grad():
        model.module.bias += member.rank  # as between two averages
    if member.rank == 0:
        agreement.unequal.add("model/bias")
    differs = agreement.compare(strict=True)
    dist.barrier()
    return sorted(agreement.unequal), differs is None


def test_a_replacement_learns_what_survivors_know(make_world):
    survivor, replacement = make_world(2).run(shares)
    assert survivor == replacement
    assert survivor[0]
    assert survivor[1], "what differs anyway is no difference"


def spoils(member, survivors):
    """Ranks from `survivors` on are new. One name differs on rank 2 only, and another one on all ranks, as before the loss."""
    model, agreement = replicated(member)
    with torch.no_grad():
        model.module.bias += member.rank
        model.module.weight += member.rank == 2
    found = agreement.compare(strict=False, is_new=member.rank >= survivors)
    dist.barrier()
    return sorted(agreement.unequal), found and (found.names, found.odd)


def test_what_only_a_replacement_has_otherwise_is_not_learned(make_world):
    for unequal, found in make_world(3).run(spoils, 2):
        assert unequal == ["model/bias"]
        assert found == (("model/weight",), (2,))


@pytest.mark.parametrize("size", [2, 3])
def test_of_one_survivor_and_replacements_those_that_agree_are_right(make_world, size):
    for unequal, found in make_world(size).run(spoils, 1):
        assert unequal == ["model/bias"]
        assert found == ((("model/weight",), (2,)) if size > 2 else None)
