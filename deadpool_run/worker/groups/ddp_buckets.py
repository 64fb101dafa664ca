"""The buckets of DDP, which rank 0 decides once for all ranks, after the first backward that reduces.

Usually that is in the second forward, which a replacement rehearses; with `static_graph` or `no_sync` later. So we let DDP
decide at the end of the step, keep rank 0's decision with the snapshot, and replay it in a replacement that has not decided.
"""

import weakref
from collections.abc import Iterator
from typing import cast

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.errors import SnapshotError
from deadpool_run.worker.compat.modules import decide_buckets, has_buckets, note_all_gradients
from deadpool_run.worker.groups.group import Group
from deadpool_run.worker.groups.registry import Registry
from deadpool_run.worker.groups.transcript import Transcript
from deadpool_run.worker.state.gradients import BucketViews


class Wrappers:
    """The live DDP modules that were made after this object, in order."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[DistributedDataParallel]] = []
        self._hook = register_module_module_registration_hook(self._note)

    def __iter__(self) -> Iterator[DistributedDataParallel]:
        return (ddp for reference in self._made if (ddp := reference()) is not None)

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()

    def _note(self, module: nn.Module, name: str, _child: nn.Module | None) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            self._made.append(weakref.ref(module))


def decide(ddp: DistributedDataParallel, registry: Registry, views: BucketViews) -> bytes | None:
    """Let DDP decide its buckets, if it can; return the decision, if replacements need it.

    The next forward would begin with this, on every rank. Raises `SnapshotError` if a peer was lost meanwhile.
    """
    if has_buckets(ddp) or (ddp.find_unused_parameters and not ddp.static_graph):  # the latter never decide
        return None
    rehearsed = registry.recording is not None or registry.playback is not None
    if not rehearsed:
        registry.recording = Transcript()
    try:
        with views.finding(ddp):
            decided = decide_buckets(ddp)
        if rehearsed or registry.recording is None or not decided:
            return None
        if registry.step_failed:
            raise SnapshotError("a peer was lost while DDP decided its buckets, and DDP cannot decide them again")
        return registry.recording.to_bytes()
    finally:
        if not rehearsed:
            registry.recording = None


def replay(ddp: DistributedDataParallel, decision: bytes, registry: Registry, views: BucketViews) -> None:
    """Have DDP make the decided buckets, unless it has made them."""
    if has_buckets(ddp):
        return
    with registry.answered_by(cast("Group", ddp.process_group), Transcript.from_bytes(decision)), views.finding(ddp):
        note_all_gradients(ddp)
        decide_buckets(ddp)
