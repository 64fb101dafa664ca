"""Running the script again from the top in the same process, when its interrupted step could not be drained.

What a run begins with is noted before it and put back behind it, as far as a process can: docs/how-recovery-works.md says
what survives. Threads, `atexit` handlers and changes to libraries do.
"""

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from deadpool_run.wire.messages import Unwound
from deadpool_run.worker.process.session import Session, put_in_environment, redirect


class ProcessBaseline:
    """What of the process a run of the script begins with. Made and put back on the main thread."""

    def __init__(self) -> None:
        self._modules = frozenset(sys.modules)
        self.environment = dict(os.environ)
        self._argv, self._path = list(sys.argv), list(sys.path)
        self._folder = Path.cwd()
        self._streams = (sys.stdin, sys.stdout, sys.stderr)
        self._hooks = (sys.excepthook, threading.excepthook)
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._warnings = list(warnings.filters)
        self._log = (logging.root.level, list(logging.root.handlers))
        self._random = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy: Any = None if numpy is None else numpy.get_state(legacy=False)
        self._torch = _torch_part("TorchBaseline")

    def put_back(self) -> None:
        """Have the process be as it was, for the next run."""
        for name in list(_own_modules(self._modules)):
            del sys.modules[name]
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv[:], sys.path[:] = self._argv, self._path
        with contextlib.suppress(OSError):  # its folder was removed meanwhile
            os.chdir(self._folder)
        sys.stdin, sys.stdout, sys.stderr = self._streams
        sys.excepthook, threading.excepthook = self._hooks
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        warnings.filters[:] = self._warnings  # type: ignore[index] # typeshed has it as a Sequence; it is a list
        logging.root.setLevel(self._log[0])
        logging.root.handlers[:] = self._log[1]
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        if self._torch is not None:
            self._torch.put_back()


def leave(worker: Session, beginning: ProcessBaseline) -> None:
    """Take down what the last run left. The worker is a replacement for its own rank; or what a spare is given instead."""
    worker.link.left()
    done, held = worker.leave()
    store_host, store_port = worker.link.orders.moved_store or (worker.store_host, worker.store_port)
    if not worker.preparing:
        worker.link.send(Unwound(done, held))
    ours = {name: value for name, value in os.environ.items() if name.startswith("DEADPOOL_")} | {
        "DEADPOOL_REPLACEMENT": "1",
        "DEADPOOL_EPOCH": str(worker.link.orders.epoch),
        "DEADPOOL_RESUME_VERSION": "-1",
        "DEADPOOL_STORE": f"{store_host}:{store_port}",
        "DEADPOOL_CAPTURE_INTERVAL": str(worker.capture_interval),
    }
    beginning.put_back()
    os.environ.update(ours)
    assigned = worker.link.orders.take_assigned()
    if assigned is not None:
        rank, fds = assigned
        named = dict(zip(rank.fds, fds, strict=True))
        redirect(named)
        put_in_environment(rank, named, whole=True)
        worker.link.preparing = None
    beginning.environment = dict(os.environ)
    worker.begin_again()
    gc.collect()  # the old model hangs in cycles; nothing of ours holds it any more
    _torch_part("free_cuda")


def _own_modules(before: frozenset[str]) -> Iterator[str]:
    """Yield the modules that the run imported and that are the script's own: no library's, nothing compiled.

    Their globals are of the last run. A library is not made to be imported twice in a process.
    """
    libraries = tuple(str(Path(path).resolve()) + os.sep for path in set(sysconfig.get_paths().values()))
    for name, module in list(sys.modules.items()):
        if name not in before and _is_source(module) and name.partition(".")[0] != __package__.partition(".")[0]:
            where = str(Path(module.__file__ or "").resolve())
            if "site-packages" not in where and not where.startswith(libraries):
                yield name


def _is_source(module: ModuleType) -> bool:
    return (getattr(module, "__file__", None) or "").endswith(".py")


def _torch_part(name: str) -> Any:
    """Return what `worker.fresh` has to call it for, where torch is loaded: the script may be none of torch's."""
    if "torch" not in sys.modules:
        return None
    from deadpool_run.worker.process import baseline  # noqa: PLC0415 - imports torch

    return getattr(baseline, name)()
