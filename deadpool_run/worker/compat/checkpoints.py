"""Private names of `torch.distributed.checkpoint` and of sharded tensors, for durable checkpoints."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.tensor import Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

storage_info = _StorageInfo
"""The place of a tensor for a checkpoint's metadata."""


def shape_and_offsets(
    shape: Sequence[int], mesh: Sequence[int], at: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the shard at a mesh coordinate, and its offsets in the whole tensor."""
    local, offsets = _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh), list(at), placements)
    return tuple(local), tuple(offsets)


def remote_writer(url: str) -> Any:
    """Return torch's writer of checkpoints to a URL."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter  # noqa: PLC0415 - needs fsspec

    return FsspecWriter(url, per_thread_copy_ahead=0, sync_files=False)
