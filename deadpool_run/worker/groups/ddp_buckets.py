"""The buckets of DDP: decided once, after the first backward that reduced, by rank 0 for all ranks.

That is mostly in the second forward, which replacements rehearse. With a static graph, or where the first steps reduce
nothing (`no_sync`), it comes later. So it is done at the end of the step, what rank 0 decided is kept as state, and a
replacement that has not come to decide is told it.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.errors import SnapshotError
from deadpool_run.worker.compat.modules import decide_buckets, has_buckets, note_all_gradients
from deadpool_run.worker.groups.transcript import Transcript


class Recorder(Protocol):
    """What is needed of the groups' registry."""

    recording: Transcript | None
    playback: Transcript | None
    step_failed: bool

    def answered_by(self, group: Any, transcript: Transcript) -> AbstractContextManager[None]:
        """Have the group answer by what was recorded."""


class Wrappers:
    """The DDPs that were made since, in order, as long as they live."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[DistributedDataParallel]] = []
        self._hook = register_module_module_registration_hook(self._note)

    def __iter__(self) -> Iterator[DistributedDataParallel]:
        """Iterate over those that are left."""
        return (ddp for reference in self._made if (ddp := reference()) is not None)

    def close(self) -> None:
        """Watch no more."""
        self._hook.remove()

    def _note(self, module: nn.Module, name: str, _child: nn.Module | None) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            self._made.append(weakref.ref(module))


def settle(ddp: DistributedDataParallel, registry: Recorder) -> bytes | None:
    """Let DDP decide its buckets, if it has all that it needs; return what was decided, if replacements are to be told.

    It is what the next forward would begin with, on every rank. Raises `SnapshotError` if a peer was lost meanwhile.
    """
    if has_buckets(ddp):
        return None
    rehearsed = registry.recording is not None or registry.playback is not None
    if not rehearsed:
        registry.recording = Transcript()
    try:
        decided = decide_buckets(ddp)
        if rehearsed or registry.recording is None or not decided:
            return None
        if registry.step_failed:
            raise SnapshotError("a peer was lost while DDP decided its buckets, which cannot be done again")
        return registry.recording.to_bytes()
    finally:
        if not rehearsed:
            registry.recording = None


def tell(ddp: DistributedDataParallel, decided: bytes, registry: Recorder) -> None:
    """Have DDP make the buckets that were decided, unless it has made them."""
    if has_buckets(ddp):
        return
    with registry.answered_by(ddp.process_group, Transcript.from_bytes(decided)):
        note_all_gradients(ddp)
        decide_buckets(ddp)
