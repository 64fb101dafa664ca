"""Real deaths at exact places of a training step.

A fault is a comma list of `key=value`: `rank`, `step`, `at` (a place), `n` (which occurrence within the step), `us`
(microseconds after it), `how`. Each fault happens once in the life of a job (an exclusively created file says so), and
in a rehearsal only if its place is `rehearsal`.

Places: setup, before (the step's block), forward, backward, issue (before a collective), collective (in one), optimizer
(between two of its kernels), after (the step's block: beside the capture), capture (in the middle of one, where the script
offers it), between (the steps' own collective), rehearsal, end (after the loop).
"""

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from telling import tell
from torch.utils._python_dispatch import TorchDispatchMode

from deadpool_run.worker.snapshot import copy_thread

if os.environ.get("COPY_THREAD") == "1":  # else a state of this size is copied at once
    copy_thread._SMALL_BYTES = 0
COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "recv",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "send",
)


@dataclass
class Fault:
    rank: int
    at: str
    step: int = -1
    n: int = 0
    us: int = 0
    how: str = "sigkill"
    text: str = ""

    @classmethod
    def parse(cls, text):
        parts = dict(part.split("=") for part in text.split(","))
        numbers = {key: int(parts.pop(key)) for key in ("rank", "step", "n", "us") if key in parts}
        return cls(**numbers, **parts, text=text)


class BugError(ValueError):
    """Raised by a fault that plays a bug of the script."""


class StrayError(Exception):
    """Raised by a fault wherever the main thread happens to be."""


def prepare():
    """Have SIGALRM raise an exception."""

    def raise_it(number, frame):
        raise StrayError("the alarm's handler")

    signal.signal(signal.SIGALRM, raise_it)


def end(how):
    """End this process now, in one of the ways that processes end."""
    match how:
        case "sigkill" | "sigterm" | "sigint" | "sigstop":
            os.kill(os.getpid(), signal.Signals[how.upper()])
        case "abort":
            os.abort()
        case "async":
            main = ctypes.c_ulong(threading.main_thread().ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(StrayError))
        case "handler":
            os.kill(os.getpid(), signal.SIGALRM)  # see `prepare`
        case "sigsegv":
            ctypes.string_at(0)
        case "exit":
            sys.exit(1)
        case "_exit":
            os._exit(7)
        case "raise" | "raise-once":
            raise BugError("a tensor that the script should have checked")
        case _:
            raise ValueError(how)


class Faults:
    """The faults of one rank; `reach` is called at every place that a training passes."""

    def __init__(self, texts, flags: Path, rank: int):
        self._faults = [fault for fault in map(Fault.parse, texts) if fault.rank == rank]
        self._flags = flags
        self.rank = rank
        self._count = {}
        self._step = -1
        self.quiet = False  # while rehearsing

    def begin_step(self, index, *, rehearsing):
        self._step, self.quiet = index, rehearsing
        self._count.clear()
        resumes = os.environ.get("DEADPOOL_RESUME_VERSION", "-1") != "-1"
        if rehearsing and (resumes or os.environ.get("DEADPOOL_REPLACEMENT") == "1"):  # and not the trial of step 1
            self.reach("rehearsal")

    def wants(self, place):
        """Whether some fault is to happen there."""
        return any(fault.at == place for fault in self._faults)

    def reach(self, place, step=None):
        """Pass a place; `step` is given where it is not that of the loop."""
        n = self._count.get(place, 0) if step is None else 0
        self._count[place] = n + 1
        if self.quiet and place != "rehearsal":
            return
        here = self._step if step is None else step
        for fault in self._faults:
            if (fault.at, fault.n) == (place, n) and fault.step in (-1, here) and self._first_time(fault):
                tell("dying", step=self._step, at=place, how=fault.how)
                if fault.us:
                    threading.Thread(target=self._later, args=(fault,), daemon=True).start()
                else:
                    end(fault.how)

    def _later(self, fault):
        time.sleep(fault.us / 1e6)
        end(fault.how)

    def _first_time(self, fault):
        if fault.how == "raise":
            return True  # a bug is there in every life
        try:
            os.close(os.open(self._flags / fault.text.replace(",", ";"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def hook(self, training):
        """Put hooks where this rank's faults need them, and nowhere else."""
        places = {fault.at for fault in self._faults}
        for block in training.blocks:
            if "forward" in places:
                block.register_forward_pre_hook(lambda *_: self.reach("forward"))
            if "backward" in places:
                block.register_full_backward_pre_hook(lambda *_: self.reach("backward"))
        if "optimizer" in places:
            kernels = _Kernels(self)
            training.optimizer.register_step_pre_hook(lambda *_: kernels.watch())
            training.optimizer.register_step_post_hook(lambda *_: kernels.__exit__(None, None, None))
        if places & {"issue", "collective"}:
            _watch_collectives(self)


class _Kernels(TorchDispatchMode):
    """Passes a place before every kernel of an optimizer's step: somewhere among them a parameter is half done."""

    def __init__(self, faults):
        super().__init__()
        self._faults = faults

    def watch(self):
        self.__enter__()  # torch takes what a hook returns for changed arguments: this one returns nothing

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._faults.reach("optimizer")
        return func(*args, **(kwargs or {}))


def _watch_collectives(faults):
    """Pass a place before and after the issue of every collective of this process, whatever group it is of."""
    group_class = type(dist.group.WORLD)

    def watched(issue):
        def call(*args, **kwargs):
            faults.reach("issue")
            work = issue(*args, **kwargs)
            faults.reach("collective")
            return work

        return call

    for name in COLLECTIVES:
        if name in vars(group_class):
            setattr(group_class, name, watched(getattr(group_class, name)))
