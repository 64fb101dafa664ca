"""Whether one view has all bytes of another one: compared with the sets of their bytes, for random views."""

import math
import random

import pytest
import torch

from deadpool_run.worker.variables.values import views
from deadpool_run.worker.variables.values.views import address_of_array, covers

CASES = 2000


def bytes_of(view):
    if isinstance(view, torch.Tensor):
        size, start, steps = (
            view.element_size(),
            view.data_ptr(),
            [step * view.element_size() for step in view.stride()],
        )
    else:
        size, start, steps = view.itemsize, address_of_array(view), view.strides
    found = {start}
    for step, count in zip(steps, view.shape, strict=True):
        found = {each + step * number for each in found for number in range(count)}
    return {each + number for each in found for number in range(size)}


def cut(view, draw):
    for _ in range(draw.randint(0, 3)):
        axis = draw.randrange(max(1, view.ndim))
        if not view.ndim or not view.shape[axis]:
            break
        start = draw.randrange(view.shape[axis])
        end = draw.randint(start + 1, view.shape[axis])
        backwards = slice(None, None, 1 if isinstance(view, torch.Tensor) else -1)
        index = draw.choice([slice(start, end), slice(start, end, draw.randint(1, 3)), backwards, start])
        view = view[tuple(index if each == axis else slice(None) for each in range(view.ndim))]
        if view.ndim > 1 and draw.random() < 0.3:
            view = view.swapaxes(0, 1)
    return view


@pytest.mark.parametrize("marks", [1 << 20, 0], ids=["with marks", "without marks"])
def test_random_views(monkeypatch, marks):
    monkeypatch.setattr(views, "_MOST_MARKED", marks)
    seed = random.randrange(1 << 32)
    draw, found = random.Random(seed), []
    for number in range(CASES):
        shape = [draw.randint(1, 6) for _ in range(draw.randint(1, 3))]
        tensor = torch.zeros(shape, dtype=draw.choice([torch.float32, torch.float64]))
        whole = tensor if draw.random() < 0.5 else tensor.numpy()
        one, other = cut(whole, draw), cut(whole, draw)
        if math.prod(one.shape) and math.prod(other.shape):
            found.append(bytes_of(other) <= bytes_of(one))
            assert covers(one, other) is found[-1], f"seed {seed}, case {number}"
    assert {True, False} <= set(found)
