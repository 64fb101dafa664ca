"""Tensors and arrays in variables come back with their layout in memory, because kernels round differently for another one."""

import numpy as np
import pytest
import torch

from deadpool_run.worker.variables.variables import Variables

LARGE = 200


class Box(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ()


def layout(value):
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.shape, value.stride(), value.is_conj(), value.is_neg()
    return value.tolist(), value.shape, value.strides


def spectrum(*shape):
    return torch.randn(*shape, dtype=torch.complex64)


TENSORS = [
    lambda: torch.linalg.eigh(torch.eye(3) + torch.ones(3, 3))[1],
    lambda: torch.randn(LARGE, LARGE).t().clone(),
    lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    lambda: torch.randn(4, 3).detach().t(),
    lambda: torch.randn(LARGE, LARGE).detach().t(),
    lambda: torch.randn(10, 3).detach()[:, 1],
    lambda: torch.randn(3, 1).expand(3, 7).detach(),
    lambda: spectrum(3, 4).conj(),
    lambda: spectrum(LARGE, LARGE).t().conj(),
    lambda: spectrum(5).conj().imag,
    lambda: torch.randn(3, 4).t().clone().requires_grad_(),
    lambda: torch.nn.Parameter(torch.randn(3, 4).t().clone()),
]
ARRAYS = [
    lambda: np.asfortranarray(np.random.default_rng(0).normal(size=(3, 4))),
    lambda: np.asfortranarray(np.random.default_rng(0).normal(size=(LARGE, LARGE))),
    lambda: np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0).copy(order="K"),
    lambda: np.arange(5.0)[::-1],
    lambda: np.arange(LARGE * LARGE, dtype=np.float64)[::-1],
    lambda: np.arange(40.0).reshape(4, 10)[:, :7],
]


@pytest.mark.parametrize("make", [*TENSORS, *ARRAYS])
@pytest.mark.parametrize("in_setup", [True, False])
def test_a_layout_comes_back(make, in_setup):
    def loop(taken, *, steps):
        value, variables = make() if in_setup else None, Variables()
        variables.begin()
        if steps and in_setup:
            with torch.no_grad():
                np.negative(value, out=value) if isinstance(value, np.ndarray) else value[..., :1].neg_()
        elif steps:
            value = make()
        taken.append(variables.take())
        if not steps:
            variables.put(taken[0])
        return layout(value)

    if in_setup and make is TENSORS[7]:
        pytest.skip("it cannot be written to")
    taken = Box()
    assert loop(taken, steps=1) == loop(taken, steps=0)


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_change_of_the_layout_alone_is_seen(size):
    def loop(taken, *, steps):
        tensor, array, variables = torch.ones(size, size), np.ones((size, size)), Variables()
        variables.begin()
        if steps:
            tensor.t_()
            array = np.asfortranarray(array)
        taken.append(variables.take())
        if not steps:
            variables.put(taken[0])
        return layout(tensor), layout(array)

    taken = Box()
    assert loop(taken, steps=1) == loop(taken, steps=0)


def test_a_tensor_with_a_layout_that_cannot_be_made_is_restored_in_place():
    column, windows, variables = torch.ones(5000, 2000)[:, 0], torch.arange(6.0).unfold(0, 3, 1), Variables()
    held = Box([column, windows])
    variables.begin()
    taken = variables.take()
    column.add_(1)
    variables.put(taken)
    assert (column is held[0], windows is held[1], float(column.sum())) == (True, True, 5000)
