"""A gradient that an update has used up is no state, however many steps without an update follow."""

import torch
from torch import nn

from deadpool_run.worker.state.gradients import UsedGradients
from deadpool_run.worker.state.protected import Protected


def protected():
    found, model = Protected(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found.add("model", model)
    found.add("optimizer", optimizer)
    return found, model, optimizer


def gradients(found, *stepped):
    return [each.gradient.tolist() for each in found.take([id(each) for each in stepped])["gradients"]]


def test_a_gradient_left_over_from_an_update_is_no_state():
    found, model, optimizer = protected()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert gradients(found, optimizer) == []
    assert gradients(found) == []
    assert gradients(found) == []


def test_a_gradient_that_was_written_to_since_is_state():
    found, model, optimizer = protected()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert gradients(found, optimizer) == []
    model(torch.ones(1, 2)).sum().backward()
    assert gradients(found) == [[[2.0, 2.0]], [2.0]]
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert gradients(found) == [[[1.0, 1.0]], [1.0]]


def test_a_gradient_with_the_identity_of_one_that_was_used_up_is_state():
    used, parameter = UsedGradients(), nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    used.note([parameter])
    assert parameter in used
    identity, others = id(parameter.grad), []
    parameter.grad = None
    while len(others) < 1000 and (not others or id(others[-1]) != identity):
        others.append(torch.ones(2))
    parameter.grad = others[-1]
    assert parameter not in used
