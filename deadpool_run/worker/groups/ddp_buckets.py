"""The buckets of DDP, which rank 0 decides once for all ranks, after the first backward that reduces.

Usually that is in the second forward, which a replacement rehearses; with `static_graph` or `no_sync` later. So we let DDP
decide at the end of the step, keep rank 0's decision with the snapshot, and replay it in a replacement that has not decided.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from deadpool_run.errors import SnapshotError
from deadpool_run.worker.compat.modules import (
    decide_buckets,
    forget_reduction,
    has_buckets,
    is_deciding_buckets,
    note_all_gradients,
)
from deadpool_run.worker.groups.group import Group
from deadpool_run.worker.groups.registry import Registry
from deadpool_run.worker.state.gradients import BucketViews
from deadpool_run.worker.transcript.transcript import Transcript

_UNDECIDED = "a peer was lost while DDP decided its buckets, and DDP cannot decide them again"


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


class LateBuckets:
    """DDPs that reduce for the first time after the first step, and then perhaps several times in one step.

    DDP would decide its buckets in the second of these forwards, unnoticed. We decide there instead, and keep the decision.
    In steps that a replacement rehearses, and in the first run of a trial, nothing is decided before the step's end.
    """

    def __init__(self, decide: Callable[[], None], is_practice: Callable[[], bool]) -> None:
        """`decide` lets every DDP decide that can; `is_practice` tells whether the running step may not decide within it."""
        self._decide = decide
        self._is_practice = is_practice
        self._hooks: dict[DistributedDataParallel, RemovableHandle] = {}
        self._seen: set[DistributedDataParallel] = set()  # forwards of the running step
        self.in_step = False
        """Whether a DDP has decided within the running step: a second run of it sums in another order."""

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._seen.clear()
        self.in_step = False

    def watch(self, ddps: Iterable[DistributedDataParallel]) -> None:
        """Watch those that have not decided, and that decide by themselves."""
        for ddp in ddps:
            if not (has_buckets(ddp) or ddp.find_unused_parameters or ddp.static_graph or ddp in self._hooks):
                self._hooks[ddp] = ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, ddp: nn.Module, _: object) -> None:
        assert isinstance(ddp, DistributedDataParallel)
        if has_buckets(ddp):
            self._hooks.pop(ddp).remove()
        elif torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            is_first = ddp not in self._seen  # it follows a reduction of an earlier step, if of any
            self._seen.add(ddp)
            if not self._is_practice():
                self._decide()
                self.in_step |= has_buckets(ddp) and not is_first
            elif not is_first:
                forget_reduction(ddp)


def check_undecided() -> None:
    """Raise `SnapshotError` in a collective by which DDP agrees on its buckets: with a fake result it would write anywhere."""
    if is_deciding_buckets():
        raise SnapshotError(_UNDECIDED)


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
            raise SnapshotError(_UNDECIDED)
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
