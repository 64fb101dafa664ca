"""Faults that a user injects into this process."""

import ctypes
import os
import threading
from typing import NoReturn

from deadpool_run.wire.messages import ExitNow, HangNow, OutOfMemoryNow

_NO_MEMORY = "CUDA out of memory. Injected by `deadpool-run kill-rank` or `--chaos`."
"""Begins as torch's own text does: scripts that catch the exception look for that."""


def inject(order: ExitNow | HangNow | OutOfMemoryNow) -> None:
    """Carry the order out. For another thread than the main one."""
    if isinstance(order, OutOfMemoryNow):
        _run_out_of_memory()
    else:
        fail(order)


def fail(order: ExitNow | HangNow) -> NoReturn:
    """End at once, or keep the interpreter for ever, as a C function that does not release it."""
    if isinstance(order, ExitNow):
        os._exit(order.code)
    library = ctypes.PyDLL(None)
    while True:
        library.pause()


def _run_out_of_memory() -> None:
    """Raise `torch.OutOfMemoryError` in the main thread, at its next bytecode instruction.

    It is raised once, as a real one is: a script that catches it goes on.
    """
    import torch  # noqa: PLC0415 - a parked worker may not have imported it yet

    class OutOfMemoryError(torch.OutOfMemoryError):
        """The interpreter makes the instance, without arguments."""

        __module__ = "torch"

        def __init__(self) -> None:
            super().__init__(_NO_MEMORY)

    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(OutOfMemoryError))
