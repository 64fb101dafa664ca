"""Raises `RunLeft` in the main thread, wherever in Python it is, so that it leaves its run of the script.

The interpreter raises the exception between two bytecode instructions (PyThreadState_SetAsyncExc). `RunLeft` is a
`BaseException`, which `except Exception` does not catch. A bare `except` or a destructor may swallow it, so it is raised
again until the main thread has left. Code that is stuck in C++ cannot be left.
"""

import ctypes
import threading

from deadpool_run.errors import RunLeft

_AGAIN_S = 0.5
"""Not sooner: a `finally` of the script may be running."""


class AsyncRaise:
    """Raises until `end`. Any thread may call `begin`, only the main thread `end`."""

    def __init__(self) -> None:
        self._main = ctypes.c_ulong(threading.main_thread().ident or 0)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ended.set()

    def begin(self) -> None:
        """Raise `RunLeft` in the main thread until `end`."""
        with self._lock:
            if not self._ended.is_set():
                return
            self._ended = threading.Event()
        threading.Thread(target=self._raise, args=(self._ended,), name="deadpool-unwind", daemon=True).start()

    def end(self) -> None:
        """Stop: the main thread has left. After this nothing is raised."""
        while True:
            try:
                with self._lock:
                    self._ended.set()
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._main, None)
            except RunLeft:
                continue  # raised once more just before
            return

    def _raise(self, ended: threading.Event) -> None:
        while True:
            with self._lock:
                if ended.is_set():
                    return
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._main, ctypes.py_object(RunLeft))
            ended.wait(_AGAIN_S)
