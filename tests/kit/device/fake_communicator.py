"""A communicator of the fake device, and its kernels. The table in `fake_device` describes their behaviour.

Peers exchange data over Gloo, in kernels: callables that run in order on the thread of a stream.
"""

import contextlib
import itertools
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.futures import Future

from deadpool_run.worker.codec import tensors_in
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.groups import gloo
from deadpool_run.worker.groups.collectives import COLLECTIVES
from kit.device.fake_streams import FakeStream, HostStream

VIOLATIONS_VARIABLE = "FAKE_DEVICE_VIOLATIONS"
"""A file that violations are appended to, for processes that a test cannot inspect."""
_BY_METHOD = {name: collective for collective in COLLECTIVES for name in collective.names}


class FakeCommunicator:
    """A communicator, with the interface of a backend of torch."""

    _numbers = itertools.count()

    def __init__(self, device, spec):
        self.device, self.spec = device, spec
        self.number = next(self._numbers)
        self.stream = FakeStream(f"{spec.group}-{self.number}")
        self.aborted = threading.Event()
        self.connected = False
        self.error = ""
        self.stash = {}
        self._inside = 0
        self._lock = threading.Lock()
        self._coalescing = False
        self._on_abort = set()
        self._gloo = self._sockets = None
        self._peers = ()
        self._graphs = 0
        self._works = threading.Lock()
        self._dump_s = float(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")) / 1000

    def connect(self, store, timeout):
        self.device.slow_connect()
        self.device.take(self)
        rank, size = self.spec.rank, len(self.spec.ranks)
        self._sockets = gloo.Device()
        host, port = self._sockets.endpoint
        store.set(f"at{rank}", f"{host} {port}")
        texts = [store.get(f"at{each}").decode() for each in range(size)]  # no abort interrupts this
        self._peers = tuple((text.split()[0], int(text.split()[1])) for text in texts)
        pairs = dist.PrefixStore("pairs", store)
        backend = self._sockets.connect(pairs, rank, size, connect_timeout=timeout, timeout=timedelta(hours=1))
        self._gloo = c10d.plain_group(pairs, rank, size, backend)
        self.connected = True

    def abort(self):
        self.device.aborting(self)
        with self._lock:
            if self._inside:
                self.device.violation(f"{self}: aborted while a thread is inside a call")
        self.aborted.set()
        for wake in list(self._on_abort):
            wake()
        if self._graphs:
            threading.Event().wait()  # nothing destroys the graphs
        if self.connected:
            self.device.synchronize()  # as freeing memory does

    def free(self):
        """Free the memory that is left after the abort."""
        if not self.stream.record().wait(5):
            self.device.violation(f"{self}: freed while its kernels run")
        self.stash.clear()
        self.device.give_back(self)
        self.stream.enqueue(None)
        if self._sockets is not None:
            self._sockets.sever(self._peers)
        self._gloo = self._sockets = None

    def shutdown(self):
        self.stream.record().wait()
        self.aborted.set()  # later calls are violations
        self.stash.clear()
        self.device.give_back(self)
        self.stream.enqueue(None)
        self._gloo = self._sockets = None

    def fail(self, error):
        """Report an error, as the watchdog does."""
        self.error = error
        holds = threading.Event()

        def watch():
            with self._works:
                holds.set()
                time.sleep(4 * self._dump_s)

        threading.Thread(target=watch, name="fake-watchdog", daemon=True).start()
        holds.wait()

    @contextlib.contextmanager
    def _call(self, what):
        if self.aborted.is_set():
            self.device.violation(f"{self}: {what} after the abort")
            raise RuntimeError(f"NCCL communicator was aborted on rank {self.spec.rank}")
        if not self.connected:
            self.device.violation(f"{self}: {what} before it is connected")
        with self._lock:
            self._inside += 1
        try:
            self.device.inside()
            yield
        finally:
            with self._lock:
                self._inside -= 1

    def _start_coalescing(self, _device):
        with self._call("a group's start"):
            self.device.group_start()
            self._coalescing = True

    def _end_coalescing(self, _device):
        with self._call("a group's end"):
            kernels = self.device.group_end()
            self._coalescing = False
            outputs = [tensor for kernel in kernels for tensor in kernel.outputs]
            return self._launch(FakeKernel(self, [part for kernel in kernels for part in kernel.calls]), outputs)

    def issue(self, name, *args, **kwargs):
        """Issue a collective."""
        parts = (*args, *kwargs.values())
        collective = _BY_METHOD[name]
        with self._call(name):
            kernel = FakeKernel(self, [(name, collective, parts)])
            self._graphs += self.device.capturing
            is_async = all(getattr(part, "asyncOp", True) for part in parts)
            if self.device.depth:
                if not self._coalescing:
                    self.device.violation(f"{self}: {name} in a group of another communicator, which is never ended")
                self.device.queue(kernel)
                return None
            if is_async:
                return self._launch(kernel, kernel.outputs)
        self.device.current.enqueue(kernel)  # not inside a call: only a CPU blocks here
        if collective.name == "barrier":
            self.device.current.record().wait()
        return None

    def _launch(self, kernel, outputs):
        if self._dump_s and self._works.locked():
            self.device.violation(f"{self}: a collective waits for a lock that the watchdog holds while it sleeps")
        self.stream.wait_event(self.device.current.record())
        self.stream.enqueue(kernel)
        return FakeKernelWork(self, self.stream.record(), outputs, kernel.inputs)

    def run(self, calls):
        """Exchange data. Return the tensors that Gloo wrote, or None if this communicator was aborted first."""
        if self.aborted.is_set():
            return None
        done, staged, failed = threading.Event(), [], []
        for name, collective, parts in calls:
            staged.append((name, collective, _stage(parts)))
        backend = self._gloo

        def exchange():
            try:
                for work in [getattr(backend, name)(*parts) for name, _, parts in staged]:
                    work.wait()
            except Exception as error:  # noqa: BLE001 - looked at below
                failed.append(error)
            done.set()

        self._on_abort.add(done.set)
        if self.aborted.is_set():
            done.set()  # the abort may have come before the line above
        threading.Thread(target=exchange, name="fake-wire", daemon=True).start()
        done.wait()
        self._on_abort.discard(done.set)
        if failed:
            if not isinstance(failed[0], RuntimeError) or not gloo.is_peer_failure(failed[0]):
                self.device.violation(f"{self}: {[name for name, *_ in calls]}: {failed[0]}")
            self.aborted.wait()  # a peer is lost
        return None if self.aborted.is_set() else staged

    def __str__(self):
        return f"communicator {self.number} of {self.spec.group!r} on rank {self.spec.rank}"


def _method(name):
    def issue(self, *args, **kwargs):
        return self.issue(name, *args, **kwargs)

    return issue


for _name in _BY_METHOD:
    setattr(FakeCommunicator, _name, _method(_name))


class FakeKernel:
    """One launch: the calls of one collective, or of a group of collectives."""

    def __init__(self, communicator, calls):
        self.communicator, self.calls = communicator, calls
        self.outputs = [tensor for _, collective, parts in calls for tensor in collective.outputs(parts)]
        self.inputs = [tensor for _, _, parts in calls for tensor in tensors_in(parts)]

    def __call__(self):
        self.communicator.device.launches += 1
        staged = self.communicator.run(self.calls)
        if staged is None:
            for output in self.outputs:
                _poison(output)
            return
        for (_, collective, parts), (_, _, copies) in zip(self.calls, staged, strict=True):
            for output, copy in zip(collective.outputs(parts), collective.outputs(copies), strict=True):
                with torch.inference_mode(output.is_inference()):
                    output.data.copy_(copy)


class FakeKernelWork(dist.Work):
    """The work that a launch returns."""

    def __init__(self, communicator, event, outputs, inputs):
        super().__init__()
        self.communicator, self.event, self.outputs = communicator, event, outputs
        communicator.stash[id(self)] = [*inputs, *outputs]

    def wait(self, timeout=None):
        device = self.communicator.device
        self.communicator.stash.pop(id(self), None)
        if timeout and not self.event.wait(timeout.total_seconds()):
            self.communicator.abort()
            raise RuntimeError("Work ran for longer than its timeout, and the communicator was aborted")
        device.current.wait_event(self.event)
        if self.communicator.aborted.is_set() or self.communicator.error:
            raise dist.DistBackendError("NCCL operation failed")
        return True

    def synchronize(self):
        """Make the current stream wait, and raise nothing."""
        self.communicator.stash.pop(id(self), None)
        self.communicator.device.current.wait_event(self.event)

    def is_completed(self):
        return self.event.passed()

    def is_success(self):
        return True

    def exception(self):
        return None

    def result(self):
        return self.outputs

    def get_future(self):
        future = Future()
        outputs, stream = self.outputs, self.communicator.stream
        if isinstance(self.communicator.device.current, HostStream):
            stream.enqueue(lambda: future.set_result(outputs))
        else:
            self.communicator.device.current.wait_event(self.event)
            future.set_result(outputs)
        return future


def _stage(part):
    if isinstance(part, torch.Tensor):
        return part.detach().clone()
    if isinstance(part, (list, tuple)):
        return type(part)(_stage(each) for each in part)
    return part


def _poison(tensor):
    is_float = tensor.is_floating_point() or tensor.is_complex()
    with torch.inference_mode(tensor.is_inference()):
        tensor.data.fill_(float("nan") if is_float else 1 if tensor.dtype is torch.bool else 255)
