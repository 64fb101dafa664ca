"""A device for collectives on CPU tensors, with NCCL's semantics where they differ from Gloo's: for tests without a GPU.

A process that calls `use()` gives every CPU tensor of a deadpool group to it (`fake_communicator`). What a kernel, a
communicator or the device does is what these sources say: PGN is ProcessGroupNCCL.cpp of torch 2.13 and .hpp its header there,
which is also in the wheel; the other files are NCCL's, of 2.30.7.

| here | there |
| --- | --- |
| a collective returns before it has run | PGN `collective` enqueues on the communicator's stream |
| a synchronous one runs on the current stream and returns None | PGN `collective`: `asyncOp ? work : nullptr`; Types.hpp:124 |
| a send or receive in a coalescing returns None | PGN `pointToPoint`: nullptr if `coalescing_state_` (.hpp:1411) |
| a barrier goes by `opts.device` | ProcessGroup.hpp:860 |
| `wait` makes the current stream wait, not the host | PGN `WorkNCCL::synchronize`: cudaStreamWaitEvent |
| `wait(timeout)` blocks the host; late: aborts and raises | PGN `WorkNCCL::wait`, `handleException` |
| a kernel whose peer is lost hangs until the abort, then leaves garbage (here NaN) | src/device/primitives.h:154 `checkAbort` |
| an abort waits for every kernel of the process | src/init.cc:267 `commFree`: cudaFree, cudaFreeHost (src/include/alloc.h:166, 568) |
| an abort waits for the graphs that captured a collective | src/init.cc:2751: `while (comm->localPersistentRefs != 0)` |
| an abort while a thread is inside a call is a violation, so is a call after it | usage/communicators.rst:505 |
| group depth belongs to a thread; what is issued inside is launched at its end | src/group.cc:27 `thread_local ncclGroupDepth` |
| a group's end on an aborted communicator raises, and leaves the depth | PGN `groupEnd`, `ncclActiveGroupCounter_` (.hpp:1468) |
| connecting waits for the store, which no abort ends | PGN `initNCCLComm`: `store->get` of the unique id |
| tensors are kept until `wait` | PGN `stashed_for_allocator_safety_` (.hpp:495) |
| a watchdog that finds an error sleeps with the lock that a collective takes | PGN `Watchdog::runLoop`: `getDumpTimeout() * 4` (.hpp:120) under `workMetaListMutex_` (.hpp:1382) |
| a process that exits cuts its peers | the kernel closes its sockets and mappings |
| a destroyed communicator waits for its kernels | PGN `shutdown`: finalize, `waitReady` |
| errors say whose they are | PGN, NCCLUtils.hpp: the result code is in the text |
"""

import os
import threading

import torch

from deadpool_run.errors import ScriptError
from deadpool_run.worker.device import choose
from deadpool_run.worker.device.nccl import SETTINGS, Nccl
from kit import defects, fake_ahead
from kit.fake_communicator import VIOLATIONS_VARIABLE, FakeCommunicator
from kit.fake_streams import FakeStream, HostStream

LATENCY_S = 0.0005
"""Of each kernel of a host that runs ahead: enough for a step's device work to take longer than the host's part."""


def use():
    """Make a fake device this process's, unless it has one; return it."""
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
        """Called by a thread that is inside of a call: a test can keep it there, or raise what the library would."""
        self.slow_create = lambda: None
        self.slow_connect = lambda: None
        self.aborting = lambda _communicator: None
        self.current = HostStream()
        self.communicators = []
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

    def connect(self, communicator, store, _spec, _place, timeout):
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

    def run_ahead(self):
        """Have the main thread's tensor operations run on a stream from now on, for good."""
        if isinstance(self.current, HostStream):
            self.current = FakeStream("current", latency_s=LATENCY_S)
            fake_ahead.read_in_order(self.current)
            fake_ahead.Ahead(self.current).__enter__()

    # --- what tests and communicators ask --------------------------------------------------------------------------

    def violation(self, what):
        self.violations.append(what)
        if path := os.environ.get(VIOLATIONS_VARIABLE):
            with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123 - one write, appended whole
                file.write(f"{os.getpid()}: {what}\n")

    def synchronize(self):
        """Wait for every kernel that has been given to any stream of the process."""
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
        """Return what was issued in the group, if this is its outer end."""
        self._group.depth -= 1
        return self._group.kernels if self._group.depth == 0 else []

    @property
    def depth(self):
        """The depth of the calling thread's group."""
        return self._group.depth

    def queue(self, kernel):
        """Keep a kernel until the thread's group ends."""
        self._group.kernels.append(kernel)
