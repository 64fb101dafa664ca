"""NCCL, through torch's `ProcessGroupNCCL` and through `ProcessGroupNCCL2` (torch 2.15 and later).

The second is the one to have: its abort revokes a communicator and frees nothing, so no abort waits for another
communicator's kernels; torch serializes it against NCCL calls; and its connecting ends at a deadline. With the first, an
abort frees memory, which waits for all kernels of the device. So all communicators are aborted at the same time.

The function of torch or NCCL on which a statement here rests is named in docs/gpu.md.
"""

import os
import re
import time
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Store

from deadpool_run.core.settings import more_to_attach_s
from deadpool_run.errors import ScriptError
from deadpool_run.worker.compat import nccl
from deadpool_run.worker.device.backend import GroupSpec

_CONNECTING = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else the watchdog ends the process when a peer is lost
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a monitor ends the process while an abort takes its time
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else a wait raises inside backward
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else a wait blocks the host, and raises
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else the watchdog sleeps a minute with the lock that every collective takes
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",  # NCCL allows an abort during other calls only then
    _CONNECTING: "30",  # of connecting; more in a large world
    "NCCL_NVLS_ENABLE": "0",  # multicast memory of a lost peer cannot be freed
}
"""Read by torch and NCCL when a communicator is made, so that `init` is early enough."""

_POLL_S = 0.0005
_PEER_FAILURE = re.compile(
    r"ncclRemoteError|ncclSystemError|remote process exited|unhandled system error|was aborted|revoked|time[d]?[ -]?out|"
    r"NCCL operation failed",  # of `ProcessGroupNCCL2`: its watchdog has found an error, or has revoked
    re.IGNORECASE,
)
"""Texts of NCCL's result codes and torch's own checks when a peer or the network fails. Other errors are the script's."""


class CudaMark:
    """An event on the current stream. A host that waits for it sleeps.

    Other threads ask, too. Their current device is the first one, on which torch would open a context.
    """

    def __init__(self) -> None:
        self._place = torch.cuda.current_device()
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def passed(self) -> bool:
        """Return whether the stream has reached the event."""
        with torch.cuda.device(self._place):
            return bool(self._event.query())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the event."""
        if timeout_s is None:
            with torch.cuda.device(self._place):
                self._event.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        while not self.passed():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _warn_of_other_values() -> None:
    """Warn once in a job of values that the user has set otherwise."""
    other = {name: os.environ.get(name, value) for name, value in SETTINGS.items() if name != _CONNECTING}
    usual = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # which torchrun sets, and so the agent
    changed = [
        f"{name}={SETTINGS[name]} (it was {was})"
        for name, was in other.items()
        if was not in {SETTINGS[name], usual.get(name)}
    ]
    if changed and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"deadpool-run sets {', '.join(changed)}: with another value, a process would not survive the loss of a peer.",
            RuntimeWarning,
            stacklevel=2,
        )


def _refuse_symmetric_memory(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise ScriptError(
        "symmetric memory, and memory that a communicator registers, may map that of other ranks, and would keep that of a lost one.\n"
        "Use collectives instead, or start the job without deadpool_run.init()."
    )


class Nccl:
    """`ProcessGroupNCCL`. An abort that is late makes the attach fail, and the rank is replaced."""

    name = "nccl"

    def configure(self) -> None:
        """See `DeviceBackend.configure`."""
        if nccl.debugs_in_detail():
            raise ScriptError(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch end the process when a collective fails, so that no survivor is left.\n"
                "Set it to INFO, or unset it."
            )
        _warn_of_other_values()
        os.environ.update(SETTINGS)
        nccl.refuse_symmetric_memory(_refuse_symmetric_memory)

    def handles(self, device: torch.device) -> bool:
        """See `DeviceBackend.handles`."""
        return device.type == "cuda"

    def place(self) -> torch.device:
        """See `DeviceBackend.place`. Each thread has its own."""
        return torch.device("cuda", torch.cuda.current_device())

    def create(self, store: Store, spec: GroupSpec, place: torch.device) -> Any:
        """See `DeviceBackend.create`."""
        # Torch keeps the value that it finds when the first group connects. An abort waits for a thread that connects, up to this time.
        limit_s = int(SETTINGS[_CONNECTING]) + int(more_to_attach_s(len(spec.ranks)))
        os.environ[_CONNECTING] = str(max(limit_s, int(os.environ[_CONNECTING])))
        with torch.cuda.device(place):
            return self._make(store, spec.rank, len(spec.ranks), self._options(spec))

    def bind(self, group: ProcessGroup, communicator: Any) -> Any:
        """See `DeviceBackend.bind`."""
        nccl.register(group, communicator)
        return group

    def handle(self, _communicator: Any) -> str:
        """See `DeviceBackend.handle`. Members find each other in the store."""
        return ""

    def connect(
        self,
        communicator: Any,
        _store: Store,
        _spec: GroupSpec,
        place: torch.device,
        _handles: Sequence[str],
        _timeout: timedelta,
    ) -> None:
        """See `DeviceBackend.connect`. Torch reads the timeout from the environment."""
        with torch.cuda.device(place):
            nccl.connect_legacy(communicator, place)

    def abort(self, communicator: Any) -> None:
        """See `DeviceBackend.abort`."""
        communicator.abort()

    def release(self, communicator: Any) -> None:
        """See `DeviceBackend.release`: the abort has freed all; what torch still keeps for its works goes with the object."""

    def shut_down(self, communicator: Any) -> None:
        """See `DeviceBackend.shut_down`."""
        communicator.shutdown()

    def check_issue(self, what: str) -> None:
        """See `DeviceBackend.check_issue`."""
        if torch.cuda.is_current_stream_capturing():
            raise ScriptError(
                f"{what} was called while a CUDA graph is captured: the graph would keep communicators that a repair "
                "replaces.\nMove collectives out of the graph, or capture it without deadpool_run.init()."
            )

    def is_peer_failure(self, error: RuntimeError) -> bool:
        """See `DeviceBackend.is_peer_failure`."""
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            return True
        return _PEER_FAILURE.search(str(error).partition("\nException raised from")[0]) is not None

    def failure(self, communicator: Any) -> str:
        """See `DeviceBackend.failure`."""
        return nccl.error_of(communicator)

    def mark(self) -> CudaMark:
        """See `DeviceBackend.mark`."""
        return CudaMark()

    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """See `DeviceBackend.streams`. There is one on each GPU that the process sees, as a model may be on several."""
        return tuple(map(torch.cuda.current_stream, range(torch.cuda.device_count())))

    def join(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """See `DeviceBackend.join`."""
        for stream in streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)

    def _make(self, store: Store, rank: int, size: int, options: Any) -> Any:
        return nccl.legacy(store, rank, size, options)

    def _options(self, spec: GroupSpec) -> Any:
        return nccl.options(spec.options, timeout=spec.timeout, group=spec.group, ranks=spec.ranks)


class Nccl2(Nccl):
    """`ProcessGroupNCCL2` with `enable_reconfigure`."""

    name = "nccl2"

    def handle(self, communicator: Any) -> str:
        """See `DeviceBackend.handle`."""
        return str(communicator.get_reconfigure_handle())

    def connect(
        self,
        communicator: Any,
        _store: Store,
        _spec: GroupSpec,
        place: torch.device,
        handles: Sequence[str],
        timeout: timedelta,
    ) -> None:
        """See `DeviceBackend.connect`."""
        with torch.cuda.device(place):
            nccl.reconfigure(communicator, list(handles), timeout)

    def release(self, communicator: Any) -> None:
        """See `DeviceBackend.release`. The abort has only revoked the communicator."""
        communicator.shutdown()

    def _make(self, store: Store, rank: int, size: int, options: Any) -> Any:
        return nccl.reconfigurable(store, rank, size, options)
