"""Digests of tensors at memory speed, on any device, for comparison and not for authentication.

The bytes are read as 4-byte words. Each word is multiplied by a fixed odd number for its position, and the products are
summed (multilinear hashing; Carter and Wegman, 1979). A change of one word always changes the digest; a change of several
words is missed with a probability of about 2**-32.
"""

import threading
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from deadpool_run.worker.compat.modules import local

_BLOCK = 8
_CHUNK_WORDS = 1 << 17
_SEED = 0x5EED
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SERIAL_NUMBERS = 1 << 14
"""Half of what torch computes on one thread."""
_SAMPLE_BYTES = 1 << 12
_SMALL_BYTES = 1 << 16
_PLACES = 64
"""A sample of a large tensor is taken at this many places."""

_weights: dict[torch.device, tuple[Tensor, Tensor]] = {}
_products = threading.Lock()


def prepare() -> None:
    """Do what the first digest would: it takes milliseconds. Starts no thread."""
    _buffers(torch.device("cpu"))


def digest(tensor: Tensor) -> int:
    """Return a digest of 63 bits of a tensor's dtype, shape and bytes; of a DTensor, of this rank's shard."""
    own = local(tensor).detach()
    found = zlib.crc32(f"{own.dtype}{tuple(own.shape)}".encode())
    data = _bytes_of(own)
    whole = data.numel() // _BLOCK * _BLOCK
    if whole:
        aligned = data[:whole] if data.storage_offset() % _BLOCK == 0 else data[:whole].clone()
        for words in aligned.view(torch.int32).split(_CHUNK_WORDS):
            found = _mixed(found, _sum(words))
    if whole < data.numel():
        found = _mixed(found, int.from_bytes(bytes(data[whole:].tolist()), "little"))
    return found >> 1


def digest_all(tensors: Sequence[Tensor]) -> int:
    """Return one digest of all these tensors. Small ones are digested together, because each call has a cost."""
    found = 0
    small: dict[str, list[Tensor]] = {}
    large = []
    for own in (local(tensor).detach() for tensor in tensors):
        found = zlib.crc32(f"{own.dtype}{tuple(own.shape)}".encode(), found)
        if own.nbytes <= _SMALL_BYTES:
            small.setdefault(str(own.device), []).append(_bytes_of(own))
        else:
            large.append(own)
    for each in [*(torch.cat(small[device]) for device in sorted(small)), *large]:
        found = _mixed(found, digest(each))
    return found >> 1


def sample(tensor: Tensor) -> int:
    """Return the digest of `sampled(tensor)`; of a sparse tensor, such as the gradient of an embedding, of its indices and values."""
    if tensor.layout is torch.sparse_coo:
        own = tensor.detach().coalesce()
        return _mixed(sample(own.indices()), sample(own.values())) >> 1
    return digest(sampled(tensor))


def sampled(tensor: Tensor) -> Tensor:
    """Return a few kilobytes of a tensor, spread over it; all of a small one."""
    own = local(tensor).detach()
    if own.nbytes <= 4 * _SAMPLE_BYTES or not own.is_contiguous():
        return own
    width = _SAMPLE_BYTES // _PLACES // own.element_size()
    return own.as_strided((_PLACES, width), (own.numel() // _PLACES, 1), own.storage_offset())


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same shape, the second one in main memory, are equal; on a device, whether samples are.

    NaN is unequal to itself.
    """
    if one.device.type == "cpu":
        return torch.equal(one, other)
    return torch.equal(sampled(one).cpu(), sampled(other))


def _bytes_of(own: Tensor) -> Tensor:
    return own.contiguous().reshape(-1).view(torch.uint8)


def _mixed(found: int, more: int) -> int:
    mixed = ((found ^ (more & _MASK)) * _FACTOR) & _MASK
    return mixed ^ (mixed >> 32)


def _sum(words: Tensor) -> int:
    """Return the weighted sum of an even number of words; wraps around, as integers of a fixed width do."""
    count = words.numel()
    with _products, torch.no_grad():
        weights, products = _buffers(words.device)
        torch.mul(words, weights[:count], out=products[:count])
        return int(products[:count].view(torch.int64).sum())


def _buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    found = _weights.get(device)
    if found is None:
        weights = _weights_in_memory().to(device)
        found = _weights[device] = weights, torch.empty_like(weights)
    return found


def _weights_in_memory() -> Tensor:
    """Return the weights, from operations so small that torch starts no threads for them: a fork server has none."""
    generator = torch.Generator().manual_seed(_SEED)
    weights = torch.empty(_CHUNK_WORDS, dtype=torch.int32)
    for part in weights.split(_SERIAL_NUMBERS):
        numbers = torch.randint(-(1 << 31), 1 << 31, part.shape, generator=generator, dtype=torch.int64)
        part.copy_(numbers | 1)
    return weights
