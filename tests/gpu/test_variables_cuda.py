"""Variables with tensors, generators and devices on CUDA devices, also in a replacement on another one."""

from types import SimpleNamespace

import pytest
import torch
from kit.taken import Taken

from deadpool_run.worker.variables.variables import Variables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(*, steps, taken):
    """Draw on the current device, restore the snapshot in `taken`, and return what is drawn next."""
    generator, seen = torch.Generator("cuda"), SimpleNamespace(total=None, drawn=None)
    generator.manual_seed(1)
    variables = Variables()
    variables.begin()
    for _ in range(steps):
        seen.total = torch.rand(1 << 15, device="cuda", generator=generator) + (0 if seen.total is None else seen.total)
        seen.drawn = torch.Generator("cuda").manual_seed(2)
        torch.rand(3, device="cuda", generator=seen.drawn)
    taken.append(variables.take())
    variables.put(taken[0])
    current = torch.device("cuda", torch.cuda.current_device())
    assert (seen.total.device, seen.drawn.device) == (current, current)
    values = [seen.total, *(torch.rand(3, device="cuda", generator=each) for each in (generator, seen.drawn))]
    return [each.tolist() for each in values]


@pytest.mark.parametrize("rehearsed", [0, 1, 3])
@pytest.mark.parametrize(
    "device", [0, pytest.param(1, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two"))]
)
def test_a_replacement_goes_on_with_what_the_lost_rank_had(device, rehearsed):
    taken = Taken()
    expected = run(steps=2, taken=taken)
    with torch.cuda.device(device):
        assert run(steps=rehearsed, taken=taken) == expected
