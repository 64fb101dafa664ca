"""The works that collectives return. Those of the running step never raise because of a lost peer; others do."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from deadpool_run.errors import PeerLostError
from deadpool_run.worker.device.channel import Channel
from deadpool_run.worker.groups.collectives import Collective, Parts
from deadpool_run.worker.groups.owner import Issuer

_SLICE = timedelta(milliseconds=20)


class GuardedWork(dist.Work):
    """A Gloo collective. If a peer fails, it starts an abort instead of raising, and its outputs are the fake result.

    A failure of the script's own is raised. Only the caller keeps the work alive, and its future until that is complete.
    """

    # On the class: setting them in each object would cost a microsecond per collective.
    _settled = False
    _failed = False
    record: Callable[[list[torch.Tensor], int | None], None] | None = None
    """Called when the collective completes, with its outputs and the source rank of a receive from any rank."""

    def __init__(self, group: Issuer, work: Any, collective: Collective, parts: Parts) -> None:
        super().__init__()
        self._group = group
        self._work = work
        self._collective = collective
        self._parts = parts
        self._generation = group.generation
        self._attempt = group.registry.attempt_here()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the outputs. Raises errors of the script, and `PeerLostError` if no running step has issued it."""
        self._group.registry.check_attempt(self._collective.name, self._attempt)
        if self._settled:
            return True
        try:
            ended = self._await(timeout)
        except RuntimeError as error:
            self._fail(error)
        else:
            if ended:
                self._settle()
            else:
                self._abandon()
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def _await(self, timeout: timedelta | None) -> bool:
        """Wait in Gloo, in slices; return False if an abort cancelled the wait before Gloo ended it."""
        work, registry = self._work, self._group.registry
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None  # C++ passes zero for none
        while True:
            try:
                work.wait(_SLICE)
            except torch.OutOfMemoryError:  # not Gloo's, but injected just now
                raise
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises if it failed
                    return True
                if deadline is not None and time.monotonic() > deadline:
                    raise
                if registry.cancellation.newest >= self._generation:
                    return False
            else:
                return True

    def is_completed(self) -> bool:
        """Whether the collective has ended in any way."""
        return self._settled or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it ended without an error of the script; an aborted collective counts as success."""
        return self._failed or bool(self._work.is_success())

    def exception(self) -> Any:
        """Return the error of the script, if there is one."""
        return None if self._failed else self._work.exception()

    def result(self) -> Any:
        """Return the outputs."""
        return self._collective.outputs(self._parts) if self._failed else self._work.result()

    def source_rank(self) -> int:
        """Return the source rank of a receive from any rank."""
        return self._group.other_rank if self._failed else int(self._work.source_rank())

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the outputs; a lost peer completes it with the fake result."""
        self._group.registry.check_attempt(self._collective.name, self._attempt)
        if self._failed:
            future: Future[Any] = Future()
            future.set_result(self._collective.outputs(self._parts))
            return future
        inner = self._work.get_future()
        guarded = _GuardedFuture(self)
        self._group.registry.cancellation.add_callback(guarded.cancel, self._generation)
        inner.add_done_callback(guarded.complete)
        return guarded.future

    def _value_of(self, inner: Future[Any]) -> Any:
        """Return the value of Gloo's completed future; the fake result if a peer failed."""
        try:
            value = inner.value()
        except RuntimeError as error:
            self._fail(error)
            return self._collective.outputs(self._parts)
        self._settle()
        return value

    def _settle(self) -> None:
        if self._settled:
            return
        self._settled = True
        self._group.registry.count_waited()
        if self.record is not None:
            record, self.record = self.record, None
            source = self.source_rank() if self._collective.name == "recv_anysource" else None
            record(self._collective.outputs(self._parts), source)

    def _fail(self, error: RuntimeError) -> None:
        """Start an abort, or raise the error if it is the script's."""
        if self._settled:
            return
        try:
            self._group.registry.failed(error, self._collective.name, self._generation, attempt=self._attempt)
        finally:
            # Break the cycle error -> traceback -> frame -> error: while it lives, the work lives, and Gloo's barrier raises
            # the error of every live work again.
            del error
        self._answer()

    def _abandon(self) -> list[torch.Tensor]:
        """Stop waiting for Gloo, which will end this work later or never; return the fake result."""
        if not self._settled:
            self._group.registry.note_fake(self._collective.name, self._attempt)
            self._answer()
        return self._collective.outputs(self._parts)

    def _answer(self) -> None:
        self._failed = self._settled = True
        self.record = None
        self._group.registry.count_waited()
        self._group.answer(self._collective, self._parts)


class _GuardedFuture:
    """The future of a guarded work, completed once: by Gloo's future, or by the abort if that never completes."""

    def __init__(self, work: GuardedWork) -> None:
        self.future: Future[Any] = Future()
        self._work = work
        self._once = threading.Lock()
        """Taken for good by the thread that completes the future."""

    def complete(self, inner: Future[Any]) -> None:
        """Pass on Gloo's result. Runs on Gloo's thread."""
        if self._once.acquire(blocking=False):
            self._work._group.registry.cancellation.remove_callback(self.cancel)  # noqa: SLF001 - one class in two halves
            self._complete_with(lambda: self._work._value_of(inner))  # noqa: SLF001

    def cancel(self) -> None:
        """Complete with the fake result."""
        if self._once.acquire(blocking=False):
            self._complete_with(self._work._abandon)  # noqa: SLF001

    def _complete_with(self, value: Callable[[], Any]) -> None:
        """Complete with what `value` returns, or with the error that it raises: none may leave Gloo's thread."""
        try:
            found = value()
        except (RuntimeError, PeerLostError) as error:
            # Both lead to frames with this future, and Python cannot free a cycle through C++.
            error.__context__ = None
            self.future.set_exception(error.with_traceback(None))
        else:
            self.future.set_result(found)


class ThreadedWork(GuardedWork):
    """A Gloo work that another thread waits for, because a wait in slices is impossible.

    For a send or receive the end of a slice is a failed connection; a reduce-scatter ignores timeouts. If an abort leaves the
    thread stuck, it holds only this operation.
    """

    def _await(self, timeout: timedelta | None) -> bool:
        over = threading.Event()
        outcome: list[RuntimeError | None] = []
        work, registry = self._work, self._group.registry
        inference = torch.is_inference_mode_enabled()

        def wait_in_gloo() -> None:
            try:
                # A reduce-scatter writes its outputs here: use the inference mode of the caller.
                with torch.no_grad(), torch.inference_mode(inference):
                    work.wait(timeout) if timeout else work.wait()
            except RuntimeError as error:
                outcome.append(error)
            else:
                outcome.append(None)
            over.set()

        registry.wait_threads.start(wait_in_gloo)
        registry.cancellation.add_callback(over.set, self._generation)
        over.wait()
        registry.cancellation.remove_callback(over.set)
        if not outcome:
            return False
        if (error := outcome.pop()) is not None:
            try:
                raise error
            finally:
                del error  # see `_fail`
        return True


class FakeWork(GuardedWork):
    """A collective that is complete from the start, with a fake result."""

    _settled = _failed = True

    def __init__(
        self, group: Issuer, collective: Collective, parts: Parts, source: int = 0, *, attempt: int | None = None
    ) -> None:
        """`attempt` is the one in which to wait; by default the running one."""
        super().__init__(group, None, collective, parts)
        self._source = source
        if attempt is not None:
            self._attempt = attempt

    def source_rank(self) -> int:
        """Return the source rank of a receive from any rank."""
        return self._source

    _source_rank = source_rank


class DeviceWork(dist.Work):
    """A work of the device's library. Its wait is the library's, but raises only what `GuardedWork` raises.

    After an abort the library raises: `ProcessGroupNCCL2` in each wait, `ProcessGroupNCCL` if its watchdog was faster. The
    outputs are garbage then, as those of a collective that was waited for before its abort. Futures are the library's own.
    """

    def __init__(
        self, group: Issuer, channel: Channel, work: Any, name: str, record: Callable[[], None] | None = None
    ) -> None:
        """`record` is called when the work is waited for. The work uses the channel's communicator, and keeps it."""
        super().__init__()
        self._group = group
        self._channel = channel
        self._work = work
        self._name = name
        self._record = record
        self._generation = group.generation
        self._attempt = group.registry.attempt_here()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as the library does: the current stream waits, the host does not."""
        registry = self._group.registry
        registry.check_attempt(self._name, self._attempt)
        try:
            done = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        except RuntimeError as error:
            self._record = None
            registry.failed(error, self._name, self._generation, attempt=self._attempt, device=registry.device)
            return True
        if self._record is not None:
            self._record()
        self._record = None
        return done

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return the library's own future, with its stream semantics."""
        self._group.registry.check_attempt(self._name, self._attempt)
        future: Future[Any] = self._work.get_future()
        return future


def _own(name: str) -> Callable[..., Any]:
    def call(self: DeviceWork, *args: Any) -> Any:
        return getattr(self._work, name)(*args)

    call.__name__ = call.__qualname__ = name
    return call


for _name in (
    *("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank"),
    *("block_current_stream", "get_future_result", "_get_op_type", "_get_duration"),
):
    setattr(DeviceWork, _name, _own(_name))
