"""Having the main thread leave its run of the script, wherever in Python it is.

The interpreter raises an exception in a thread between two of its instructions (PyThreadState_SetAsyncExc). It is not an
`Exception`, so that no handler for those keeps it; one for everything, or a destructor, may. So it is raised again until
the main thread says that it is out. Code that is stuck in C++ cannot be left.
"""

import ctypes
import threading

from deadpool_run.errors import RunLeft

_AGAIN_S = 0.5
"""Not sooner: the script's own `finally` may be at work."""


class Unwinding:
    """`begin` is any thread's, `end` the main thread's."""

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
        """Return when nothing is raised any more: the main thread is out."""
        while True:
            try:
                with self._lock:
                    self._ended.set()
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._main, None)
            except RunLeft:
                continue  # raised once more, on the way here
            return

    def _raise(self, ended: threading.Event) -> None:
        while True:
            with self._lock:
                if ended.is_set():
                    return
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._main, ctypes.py_object(RunLeft))
            ended.wait(_AGAIN_S)
