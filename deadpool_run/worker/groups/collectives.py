"""The table of collectives: which arguments are the outputs of each, and its fake result without peers.

A fake result is deterministic and, as far as the arguments allow, finite: outputs become copies of this rank's input, or
zeros, never uninitialized memory. In-place collectives keep floating-point tensors (with non-finite values set to zero),
because a rehearsing model should keep sane weights under a broadcast.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from deadpool_run.worker.codec import tensors_in

Parts = tuple[Any, ...]
"""The arguments of a collective in the order of its signature; keywords follow the positional ones."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective. `names` are the methods that issue it; one that every supported torch has comes first."""

    names: tuple[str, ...]
    outputs: Callable[[Parts], list[torch.Tensor]]
    fake: Callable[[Parts, int, int], None]
    reduced: int | None = None
    """If it reduces data: the index of the argument that holds this rank's input."""

    @property
    def name(self) -> str:
        """The name in transcripts."""
        return self.names[0]


def _first(parts: Parts) -> list[torch.Tensor]:
    return list(tensors_in(parts[:1]))


def _none(_parts: Parts) -> list[torch.Tensor]:
    return []


def _root(parts: Parts) -> int:
    for part in parts[1:]:
        if isinstance(part, int):
            return part
        root = getattr(part, "rootRank", None)
        if root is not None:
            return int(root)
    return 0


# Values are written through `.data`, because a real collective does not change the version counters of autograd either.


def _fill(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `output`; write zeros if their sizes differ."""
    if output.numel() == source.numel():
        output.data.copy_(source.data.view_as(output))
    else:
        output.data.zero_()


def _fill_each(outputs: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    for output, source in zip(outputs, sources, strict=False):
        _fill(output, source)


def _keep(_parts: Parts, _rank: int, _size: int) -> None:
    return


def _zero(parts: Parts, _rank: int, _size: int) -> None:
    for tensor in _first(parts):
        tensor.data.zero_()


def _broadcast(parts: Parts, rank: int, _size: int) -> None:
    if rank == _root(parts):
        return
    for tensor in _first(parts):
        if tensor.is_floating_point() and tensor.element_size() > 1:
            torch.nan_to_num_(tensor.data, nan=0.0, posinf=0.0, neginf=0.0)
        else:
            tensor.data.zero_()


def _gather_lists(parts: Parts, _rank: int, _size: int) -> None:
    inputs = list(tensors_in(parts[1]))
    if len(inputs) == 1:
        _fill_each(_first(parts), repeat(inputs[0]))
        return
    for outputs, source in zip(parts[0], inputs, strict=False):
        _fill_each(tensors_in(outputs), repeat(source))


def _gather_coalesced(parts: Parts, _rank: int, _size: int) -> None:
    """Write the fake result of `allgather_coalesced`: one list of outputs per rank, each as long as the list of inputs."""
    for outputs in parts[0]:
        _fill_each(outputs, tensors_in(parts[1]))


def _gather_flat(parts: Parts, _rank: int, size: int) -> None:
    for output, source in zip(_first(parts), tensors_in(parts[1]), strict=False):
        if output.numel() == size * source.numel() and output.is_contiguous():
            output.data.view(size, -1).copy_(source.data.reshape(1, -1))  # without a second output in memory
        else:
            _fill(output, source.reshape(-1).repeat(size))


def _scatter_lists(parts: Parts, rank: int, _size: int) -> None:
    lists = [parts[1]] if isinstance(parts[1][0], torch.Tensor) else parts[1]
    for output, chunks in zip(_first(parts), lists, strict=True):
        _fill(output, chunks[rank])


def _scatter_flat(parts: Parts, rank: int, size: int) -> None:
    _fill_each(_first(parts), (source.reshape(size, -1)[rank] for source in tensors_in(parts[1])))


def _exchange(parts: Parts, _rank: int, _size: int) -> None:
    _fill_each(_first(parts), tensors_in(parts[1]))


COLLECTIVES = (
    Collective(("allreduce",), _first, _keep, reduced=0),
    Collective(("allreduce_coalesced",), _first, _keep, reduced=0),
    Collective(("reduce",), _first, _keep, reduced=0),
    Collective(("broadcast",), _first, _broadcast),
    Collective(("allgather",), _first, _gather_lists),
    Collective(("allgather_coalesced",), _first, _gather_coalesced),
    Collective(("_allgather_base", "all_gather_single"), _first, _gather_flat),
    Collective(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), _first, _gather_flat),
    Collective(("gather",), _first, _gather_lists),
    Collective(("gather_single", "gather_into_tensor"), _first, _gather_flat),
    Collective(("scatter",), _first, _scatter_lists),
    Collective(("reduce_scatter",), _first, _scatter_lists, reduced=1),
    Collective(("_reduce_scatter_base", "reduce_scatter_single"), _first, _scatter_flat, reduced=1),
    Collective(
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), _first, _scatter_flat, reduced=1
    ),
    Collective(("alltoall",), _first, _exchange),
    Collective(("alltoall_base", "all_to_all_single"), _first, _exchange),
    Collective(("send",), _none, _keep),
    Collective(("recv",), _first, _zero),
    Collective(("recv_anysource", "recvAnysource"), _first, _zero),
    Collective(("barrier",), _none, _keep),
)
COALESCED = Collective(("coalescing",), _none, _keep)
"""The end of a group of coalesced collectives, each of which is issued by itself."""


def place_of(collective: Collective, parts: Parts) -> torch.device | None:
    """Return the device of the tensors. A barrier has none, but may name a device."""
    found = next((tensor.device for tensor in tensors_in(parts[:2])), None)
    if found is None and collective.name == "barrier" and parts:
        found = parts[0].device
    return found


def answer(collective: Collective, parts: Parts, rank: int, size: int) -> None:
    """Write the fake result into the outputs. Does not raise for arguments that a real collective might reject."""
    try:
        collective.fake(parts, rank, size)
    except (RuntimeError, IndexError, TypeError, ValueError):
        # Arguments that fit no collective, as in an aborted step: all outputs become zeros.
        _zero(parts, rank, size)
