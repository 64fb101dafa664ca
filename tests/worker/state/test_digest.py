"""Digests of tensors: any changed bit changes them, whatever the dtype, layout and size."""

import random

import pytest
import torch

from deadpool_run.worker.state.digest import are_equal, digest, digest_all, sample

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool, torch.complex64]
LARGE = 300_001


def flipped(tensor, bit):
    """Return a copy that differs in one bit of its bytes."""
    data = tensor.clone().view(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8
    return data.view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("size", [1, 3, 8, 1000, LARGE])
def test_one_bit_anywhere_changes_the_digest(size):
    seed = random.SystemRandom().randrange(1 << 32)
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(size, generator=generator)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    for bit in torch.randint(32 * size, (20,), generator=generator).tolist():
        assert digest(flipped(tensor, bit)) != before, f"seed {seed}, bit {bit}"


def test_two_values_that_change_places_change_the_digest():
    tensor = torch.arange(1000.0)
    swapped = tensor.clone()
    swapped[[10, 500]] = tensor[[500, 10]]
    assert digest(swapped) != digest(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_and_shape_count(dtype):
    tensor = torch.zeros(6, dtype=dtype)
    assert len({digest(tensor), digest(tensor.view(2, 3)), digest(torch.zeros(7, dtype=dtype))}) == 3


def test_a_layout_does_not_count():
    image = torch.randn(2, 3, 5, 5)
    assert digest(image.to(memory_format=torch.channels_last)) == digest(image)
    assert digest(torch.empty(0)) == digest(torch.empty(0))
    assert digest(torch.arange(9.0)[1:]) == digest(torch.arange(1.0, 9.0))


def test_a_sample_sees_what_changes_everywhere_and_all_of_a_small_tensor():
    large = torch.randn(LARGE)
    assert sample(large * 0.999) != sample(large)
    assert not are_equal(large, large * 0.999)
    small = torch.randn(100)
    changed = small.clone()
    changed[57] += 1
    assert sample(changed) != sample(small)
    assert not are_equal(small, changed)
    assert are_equal(small, small.clone())


def test_one_bit_of_any_of_many_tensors_changes_the_digest_of_all():
    generator = torch.Generator().manual_seed(random.SystemRandom().randrange(1 << 32))
    tensors = [torch.randn(size, generator=generator) for size in (1, 3, 8, 1000, LARGE)]
    before = digest_all(tensors)
    assert digest_all([tensor.clone() for tensor in tensors]) == before
    assert digest_all(tensors[::-1]) != before
    for place, tensor in enumerate(tensors):
        bit = int(torch.randint(32 * tensor.numel(), (1,), generator=generator))
        assert digest_all([*tensors[:place], flipped(tensor, bit), *tensors[place + 1 :]]) != before, (place, bit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_and_shape_of_each_of_many_tensors_count(dtype):
    rest = torch.ones(5)
    tensor = torch.zeros(6, dtype=dtype)
    forms = tensor, tensor.view(2, 3), torch.zeros(7, dtype=dtype), torch.zeros(6, dtype=torch.int8)
    assert len({digest_all([rest, form]) for form in forms}) == 4
