"""A device for collectives on CPU tensors with NCCL's semantics, for tests without a GPU.

In a process that calls `use()`, the device runs all collectives of deadpool groups on CPU tensors (`fake_communicator`).
The table names the source of each behaviour. PGN is ProcessGroupNCCL.cpp of torch 2.13; .hpp is its header, which is
also in the wheel. PGN2 is ProcessGroupNCCL2 of torch 2.15, in the folder nccl2. The other files are those of NCCL 2.30.7.

| behaviour | source |
| --- | --- |
| a collective returns before it has run | PGN `collective` enqueues on the communicator's stream |
| a synchronous collective runs on the current stream and returns None | PGN `collective`: `asyncOp ? work : nullptr`; Types.hpp:124 |
| a send or receive in a coalescing returns None | PGN `pointToPoint`: nullptr if `coalescing_state_` (.hpp:1411) |
| a barrier uses the device in `opts.device` | ProcessGroup.hpp:860 |
| the host waits for a synchronous barrier | PGN `WorkNCCL::wait`: `isBarrierOp_`; PGN2 WorkNCCL.cpp `synchronizeInternal`: `hostBlocking_` |
| `wait` makes the current stream wait, not the host | PGN `WorkNCCL::synchronize`: cudaStreamWaitEvent |
| `wait` raises after an abort, or when the watchdog has found an error, also for a collective that had ended | PGN2 WorkNCCL.cpp `wait`: `checkStatus` asks `comm->getError()` before the events; PGN `wait`: `if (exception())` |
| `synchronize` and `get_future` raise nothing then | PGN2 WorkNCCL.cpp `synchronizeInternal`, `getFuture` |
| `wait(timeout)` blocks the host; after the timeout it aborts and raises | PGN `WorkNCCL::wait`, `handleException` |
| a kernel whose peer is lost hangs until the abort, then leaves garbage (here NaN) | src/device/primitives.h:154 `checkAbort` |
| an abort waits for every kernel of the process | src/init.cc:267 `commFree`: cudaFree, cudaFreeHost (src/include/alloc.h:166, 568) |
| an abort waits for the graphs that captured a collective | src/init.cc:2751: `while (comm->localPersistentRefs != 0)` |
| an abort while a thread is inside a call is a violation, and so is a call after an abort | usage/communicators.rst:505 |
| each thread has a group depth; calls inside a group are launched at its end | src/group.cc:27 `thread_local ncclGroupDepth` |
| a group's end on an aborted communicator raises, and keeps the depth | PGN `groupEnd`, `ncclActiveGroupCounter_` (.hpp:1468) |
| connecting waits for the store, and no abort ends this wait | PGN `initNCCLComm`: `store->get` of the unique id |
| tensors are kept until `wait` | PGN `stashed_for_allocator_safety_` (.hpp:495) |
| a watchdog that finds an error holds the lock of all collectives while it sleeps | PGN `Watchdog::runLoop`: `getDumpTimeout() * 4` (.hpp:120) under `workMetaListMutex_` (.hpp:1382) |
| the exit of a process breaks its peers' connections | the kernel closes its sockets and mappings |
| a communicator takes memory when it connects, and has it until it is freed; without memory, connecting raises | src/init.cc `ncclCommInitRankFunc`, `commFree`; NCCLUtils.hpp: ncclUnhandledCudaError |
| a destroyed communicator waits for its kernels | PGN `shutdown`: finalize, `waitReady` |
| errors show who caused them | PGN, NCCLUtils.hpp: the result code is in the text |
"""

import contextlib
import os
import sys
import threading

import torch
import torch.distributed as dist

from deadpool_run.errors import ScriptError
from deadpool_run.worker.device import choose
from deadpool_run.worker.device.nccl import SETTINGS, Nccl
from kit.device import defects, fake_ahead
from kit.device.fake_communicator import VIOLATIONS_VARIABLE, FakeCommunicator
from kit.device.fake_streams import FakeStream, HostStream

BUFFER_BYTES = 1 << 20
"""Of a communicator, for each member."""
OUT_OF_MEMORY = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
LATENCY_S = 0.0005
"""Of each kernel of a host that runs ahead. It makes the device's part of a step longer than the host's."""


def use():
    """Return the fake device of this process. Make it at the first call.

    Its modules are a library's, as torch's are: a snapshot of the script's variables has none of its communicators.
    """
    for name, module in sys.modules.items():
        if name.partition(".")[0] == "kit":
            module.__file__ = None
    defects.plant_named()
    device = choose.device_backend()
    if device is None:
        device = FakeDevice()
        choose.use(device)
    return device


class _Group(threading.local):
    """A group that a thread has started with ncclGroupStart."""

    depth = 0
    kernels = ()


class FakeDevice:
    """The process's device: a `DeviceBackend`."""

    name = "fake"

    def __init__(self):
        self.violations = []
        self.launches = 0
        self.capturing = False
        self.inside = lambda: None
        """Called by a thread that is inside a call. A test can block the thread there, or raise an error of the library."""
        self.slow_create = lambda: None
        self.slow_connect = lambda: None
        self.aborting = lambda _communicator: None
        self.current = HostStream()
        self.communicators = []
        self.memory_limit = None
        self._taken = {}
        self._group = _Group()

    # --- the protocol ----------------------------------------------------------------------------------------------

    def configure(self):
        os.environ.update(SETTINGS)

    def handles(self, device):
        return device.type == "cpu"

    def place(self):
        return torch.device("cpu")

    def create(self, _store, spec, _place):
        self.slow_create()
        communicator = FakeCommunicator(self, spec)
        self.communicators.append(communicator)
        return communicator

    def bind(self, _group, communicator):
        return communicator

    def handle(self, communicator):
        return f"{communicator.spec.group}/{communicator.spec.rank}"

    def connect(self, communicator, store, spec, _place, handles, timeout):
        if list(handles) != [f"{spec.group}/{rank}" for rank in range(len(spec.ranks))]:
            self.violation(f"{communicator}: connects with {handles}")
        communicator.connect(store, timeout)

    def abort(self, communicator):
        communicator.abort()

    def release(self, communicator):
        self.communicators.remove(communicator)
        communicator.free()

    def shut_down(self, communicator):
        communicator.shutdown()
        self.communicators.remove(communicator)

    def check_issue(self, what):
        if self.capturing:
            raise ScriptError(f"{what} was called while a graph is captured")

    def is_peer_failure(self, error):
        return Nccl().is_peer_failure(error)

    def failure(self, communicator):
        return communicator.error

    def mark(self):
        return self.current.record()

    def streams(self):
        return (self.current,)

    def join(self, streams):
        for stream in streams:
            if stream is not self.current:
                self.current.wait_event(stream.record())

    @contextlib.contextmanager
    def on(self, stream):
        """Give work to another stream in here. It begins there after what the current one has."""
        stream.wait_event(self.current.record())
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def stream(self, name):
        """Return another stream."""
        return FakeStream(name, latency_s=LATENCY_S)

    @property
    def is_ahead(self):
        """Whether the host runs ahead of tensor operations."""
        return not isinstance(self.current, HostStream)

    def run_ahead(self):
        """Run the main thread's tensor operations on a stream from now on."""
        if isinstance(self.current, HostStream):
            self.current = FakeStream("current", latency_s=LATENCY_S)
            fake_ahead.read_in_order(self)
            fake_ahead.Ahead(self).__enter__()

    # --- for tests and communicators -------------------------------------------------------------------------------

    @property
    def memory(self):
        """The bytes that communicators have: their buffers, and the tensors that they keep until a wait."""
        kept = {
            id(tensor): tensor.nbytes
            for each in self.communicators
            for tensors in each.stash.values()
            for tensor in tensors
        }
        return sum(self._taken.values()) + sum(kept.values())

    def take(self, communicator):
        """Allocate a communicator's buffers."""
        nbytes = BUFFER_BYTES * len(communicator.spec.ranks)
        if self.memory_limit is not None and self.memory + nbytes > self.memory_limit:
            raise dist.DistBackendError(OUT_OF_MEMORY)
        self._taken[communicator] = nbytes

    def give_back(self, communicator):
        """Free them."""
        self._taken.pop(communicator, None)

    def violation(self, what):
        self.violations.append(what)
        if path := os.environ.get(VIOLATIONS_VARIABLE):
            with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - one write, appended whole
                file.write(f"{os.getpid()}: {what}\n")

    def synchronize(self):
        """Wait for all kernels on all streams of the process."""
        for communicator in list(self.communicators):
            communicator.stream.record().wait()
        if isinstance(self.current, HostStream):
            self.current.wait_idle()
        else:
            self.current.record().wait()

    def group_start(self):
        if self._group.depth == 0:
            self._group.kernels = []
        self._group.depth += 1

    def group_end(self):
        """End a group of the thread. Return the kernels of the group if this is the outermost end."""
        self._group.depth -= 1
        return self._group.kernels if self._group.depth == 0 else []

    @property
    def depth(self):
        """The depth of the calling thread's group."""
        return self._group.depth

    def queue(self, kernel):
        """Keep a kernel until the thread's group ends."""
        self._group.kernels.append(kernel)
