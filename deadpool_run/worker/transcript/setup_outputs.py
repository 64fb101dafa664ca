"""Large floating-point outputs of set-up's collectives: data that a replacement cannot compute alone.

Torch's own collectives move the state of models (DDP's first broadcast, FSDP's gathers), which is too large to record and is
restored from the snapshot. Collectives of the script and of other libraries are recorded, except into protected tensors. Only
when the loop begins it is known which these are, so outputs are held until then.
"""

import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from deadpool_run.ids import is_of_package
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.compat.modules import local
from deadpool_run.worker.process.frames import is_scripts
from deadpool_run.worker.state.digest import digest

_MOST_HELD = 256 << 20
"""Bytes. Of later outputs only a digest is held."""


class Origin(Enum):
    """The caller of a collective."""

    TORCH = "torch"
    LIBRARY = "library"
    SCRIPT = "script"


def origin() -> Origin:
    """Return which code has called the running collective."""
    if c10d.in_backward():
        return Origin.TORCH
    for frame, _ in traceback.walk_stack(sys._getframe(1)):  # noqa: SLF001 - the documented way to the callers
        module = str(frame.f_globals.get("__name__", ""))
        if is_of_package(module) or c10d.passes_on(module):
            continue
        if is_scripts(frame):
            return Origin.SCRIPT
        return Origin.TORCH if module.partition(".")[0] == "torch" else Origin.LIBRARY
    return Origin.LIBRARY


@dataclass(slots=True)
class Output:
    """A large output of a collective, as it was when that completed."""

    values: list[Any]
    """The values of the collective's entry in the transcript."""
    index: int
    """Of this output among them."""
    words: str
    nbytes: int
    is_scripts: bool
    storage: StorageWeakRef | None
    value: Tensor | None = None
    """A copy, if there was room."""
    digest: int | None = None
    """Of its bytes, if there was no room."""

    def keep(self) -> None:
        """Put the value into the transcript."""
        self.values[self.index] = self.value


class SetupOutputs:
    """The large outputs of set-up so far. The transcript's lock protects it."""

    def __init__(self) -> None:
        self.ended = False
        """Whether the loop has begun."""
        self._origins: dict[
            int, Origin
        ] = {}  # of collectives that have not completed, by the identity of their entries
        self._held: list[Output] = []
        self._nbytes = 0
        self._protected: set[StorageWeakRef] = set()

    def expect(self, entry: object) -> None:
        """Note that a collective with large outputs is being issued."""
        if not self.ended and (called_by := origin()) is not Origin.TORCH:
            self._origins[id(entry)] = called_by

    def completed(self, entry: object) -> Origin | None:
        """Return the caller of a completed collective, if its large outputs are to be held."""
        return self._origins.pop(id(entry), None)

    def hold(self, output: Output, tensor: Tensor) -> None:
        """Hold an output until the loop begins."""
        if self._nbytes + output.nbytes <= _MOST_HELD:
            self._nbytes += output.nbytes
            output.value = tensor.detach().clone()
        elif not (tensor.is_cuda and c10d.is_capturing()):
            output.digest = digest(tensor)
        self._held.append(output)

    def is_protected(self, output: Output) -> bool:
        """Return whether the output is in the memory of a protected tensor."""
        return output.storage in self._protected

    def end(self, protected: Iterable[Tensor], room: int) -> tuple[list[Output], list[Output]]:
        """End set-up. Return the outputs to keep, of up to `room` bytes, and those of the script that find no room.

        The latter are not the state of a protected tensor, so that a replacement would lack them.
        """
        tensors, self.ended = list(protected), True
        self._protected = {reference for each in tensors if (reference := storage_of(each)) is not None}
        kept, lost = [], []
        for output in self._held:
            if self.is_protected(output):
                continue
            if output.value is not None and output.nbytes <= room:
                room -= output.nbytes
                kept.append(output)
            elif output.is_scripts:
                lost.append(output)
        self._held = []
        return kept, _not_equal_to(tensors, lost)


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's memory, equal for tensors that share it; None if it has none of its own."""
    try:
        return StorageWeakRef(local(tensor).untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def _not_equal_to(protected: Iterable[Tensor], outputs: list[Output]) -> list[Output]:
    """Return the outputs that equal no protected tensor: a script may read a checkpoint on one rank, and send its tensors.

    One of the size of a sharded tensor counts as that: the shard is restored.
    """
    if not outputs:
        return []
    by_size, sharded = defaultdict(list), set()
    for each in protected:
        by_size[local(each).nbytes].append(each)
        if local(each).numel() != each.numel():
            sharded.add(each.numel() * each.element_size())
    found = []
    for output in outputs:
        if output.nbytes in sharded:
            continue
        own = output.digest if output.value is None else digest(output.value)
        if own is None or all(digest(each) != own for each in by_size[output.nbytes]):
            found.append(output)
    return found
