"""`deadpool-run check` hashes all state of a rank on which the next step depends, each part under its own name."""

import random

import pytest
import torch
from torch import nn

from deadpool_run.worker.check.states import States, digest
from deadpool_run.worker.state.protected import Protected


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))
        self.average = torch.zeros(2)
        self.hidden = [nn.Linear(2, 2)]


class Snapshots:
    """As much of the worker's snapshots as is looked at."""

    def __init__(self, **objects):
        self.protected = Protected()
        self.values = {}
        for name, obj in objects.items():
            self.protected.add(name, obj)


class Progress:
    def __init__(self):
        self.state = {"epoch": 1, "seen": {3, 4}, "last": torch.ones(2)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture
def rank():
    """A rank that has done one step, with a second optimizer that nobody protects; and what is hashed of it."""
    net, extra, progress = Net(), nn.Parameter(torch.ones(2)), Progress()
    optimizer = torch.optim.AdamW(net.parameters())
    loose = torch.optim.SGD([extra], momentum=0.9)
    states = States(Snapshots(net=net, optimizer=optimizer, progress=progress).protected)
    (net.layer(torch.ones(3)).sum() + extra.sum()).backward()
    optimizer.step()
    loose.step()
    yield net, optimizer, loose, progress, states
    states.close()


def changed(states, change):
    """Return kind and name of what is hashed otherwise after a change."""
    before = states.digests()
    change()
    after = states.digests()
    return {(kind, name) for kind in before for name in before[kind] if before[kind][name] != after[kind].get(name)}


CHANGES = {
    ("weights", "net/layer.weight"): lambda net, *_: net.layer.weight.data.view(-1)[0].add_(1e-6),
    ("buffers", "net/count"): lambda net, *_: net.count.add_(1),
    ("attributes", "net/average"): lambda net, *_: net.average.add_(1),
    ("attributes", "net/hidden.0.bias"): lambda net, *_: net.hidden[0].bias.data.add_(1),
    ("optimizer", "optimizer/net/layer.bias/exp_avg"): lambda net, own, *_: own.state[net.layer.bias]["exp_avg"].add_(
        1
    ),
    ("optimizer", "optimizer/groups.0.lr"): lambda _net, own, *_: own.param_groups[0].update(lr=0.5),
    ("optimizer", "SGD 1 (not protected)/0.0/momentum_buffer"): lambda _net, _own, loose, *_: loose.state[
        loose.param_groups[0]["params"][0]
    ]["momentum_buffer"].add_(1),
    ("weights", "SGD 1 (not protected)/0.0"): lambda _net, _own, loose, *_: loose.param_groups[0]["params"][
        0
    ].data.add_(1),
    ("values", "progress.epoch"): lambda *rank: rank[3].state.update(epoch=2),
    ("values", "progress.seen"): lambda *rank: rank[3].state["seen"].add(5),
    ("values", "progress.last"): lambda *rank: rank[3].state["last"].add_(1),
    ("generators", "python"): lambda *_: random.random(),
    ("generators", "torch"): lambda *_: torch.rand(1),
}


@pytest.mark.parametrize("name", CHANGES, ids="-".join)
def test_a_change_is_seen_under_its_name_alone(rank, name):
    *parts, states = rank
    assert changed(states, lambda: CHANGES[name](*parts)) == {name}


def test_nothing_is_hashed_otherwise_where_nothing_changed(rank):
    assert changed(rank[-1], lambda: None) == set()


def test_a_digest_is_of_kind_and_shape_too():
    zeros = torch.zeros(4)
    assert digest(zeros) == digest(torch.zeros(8)[::2])
    assert len({digest(each) for each in (zeros, zeros.view(2, 2), zeros.int(), zeros + 1, torch.zeros(0))}) == 5


def test_an_optimizer_that_is_not_watched_any_more_is_not_noted(rank):
    *_, states = rank
    states.close()
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other]).step()
    assert not any("SGD 2" in name for name in states.digests()["optimizer"])


def test_the_amount_is_that_of_weights_buffers_and_optimizer_state(rank):
    net, *_, states = rank
    weights = sum(parameter.nbytes for parameter in net.parameters())
    assert states.nbytes() == 3 * weights + net.count.nbytes + 2 * 4 + 2 * 4  # steps of AdamW; momentum of SGD


def test_a_gradient_that_is_state_counts():
    net = Net()
    snapshots = Snapshots(net=net, optimizer=torch.optim.SGD(net.parameters()))
    states = States(snapshots.protected, lambda: snapshots.values.get("gradients", ()))

    def accumulate():
        net.layer(torch.ones(3)).sum().backward()
        snapshots.values = snapshots.protected.take()

    accumulate()
    assert changed(states, accumulate) == {("gradients", "net/layer.weight"), ("gradients", "net/layer.bias")}
    states.close()
