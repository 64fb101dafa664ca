"""Runs the script again from the top in the same process, when its interrupted step could not be aborted.

The process's state is saved before a run and restored after it, as far as a process can: threads, `atexit` handlers and
changes to libraries survive (docs/how-recovery-works.md).
"""

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from deadpool_run.core.events import RunUnwound
from deadpool_run.wire.messages import THIS_WORKER
from deadpool_run.worker.practice import practice
from deadpool_run.worker.process.script_files import ImportedModules, own_modules
from deadpool_run.worker.process.session import Session, assume


class ProcessBaseline:
    """The process's state before a run of the script. Taken and restored on the main thread."""

    def __init__(self) -> None:
        self._modules = ImportedModules()
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
        baseline = _torch_baseline()
        self._torch: Any = None if baseline is None else baseline.TorchBaseline()

    def restore(self) -> None:
        """Restore that state, for the next run.

        The script's modules go, because their globals belong to the last run. Libraries stay: they are not made to be
        imported twice in a process.
        """
        for name, _, _ in own_modules(self._modules):
            del sys.modules[name]
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv[:], sys.path[:] = self._argv, self._path
        with contextlib.suppress(OSError):  # the folder was removed meanwhile
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
            self._torch.restore()


def leave(worker: Session, baseline: ProcessBaseline) -> None:
    """Tear down the last run. The next run is a replacement for the same rank, or for the rank that a spare was given."""
    worker.link.left()
    practice.end()
    done, held = worker.leave()
    store_host, store_port = worker.link.orders.moved_store or worker.store
    if not worker.preparing:
        worker.link.send(RunUnwound(THIS_WORKER, done, held))
    ours = {name: value for name, value in os.environ.items() if name.startswith("DEADPOOL_")} | {
        "DEADPOOL_REPLACEMENT": "1",
        "DEADPOOL_EPOCH": str(worker.link.orders.epoch),
        "DEADPOOL_RESUME_VERSION": "-1",
        "DEADPOOL_STORE": f"{store_host}:{store_port}",
        "DEADPOOL_CAPTURE_INTERVAL": str(worker.capture_interval),
    }
    baseline.restore()
    os.environ.update(ours)
    assigned = worker.link.orders.take_assigned()
    if assigned is not None:
        assume(*assigned)
        worker.link.preparing = None
    baseline.environment = dict(os.environ)
    worker.begin_again()
    gc.collect()  # the old model is in reference cycles; nothing of ours holds it any more
    torch_baseline = _torch_baseline()
    if torch_baseline is not None:
        torch_baseline.begin_again()


def _torch_baseline() -> ModuleType | None:
    """Return our module that imports torch, if torch is loaded: the script may not use it."""
    if "torch" not in sys.modules:
        return None
    from deadpool_run.worker.process import baseline  # noqa: PLC0415 - imports torch

    return baseline
