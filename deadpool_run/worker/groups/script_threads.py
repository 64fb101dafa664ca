"""Threads of the script: those that it or a library starts through `threading`, and their collectives.

Such a collective belongs to no step: a background checkpoint runs through several, and nothing discards what it reads.
The thread that runs the step loop is mostly the main one. Threads that C++ starts (autograd's, Gloo's) and our own run parts of a step, and so does a backward pass in any thread.
"""

import sys
import threading
from concurrent.futures import thread as executors
from types import FrameType
from weakref import WeakSet

from deadpool_run.worker.compat import c10d

_OF_CPP = "_DummyThread"
"""The name of Python's class for threads that it has not started."""

_loops = threading.main_thread().ident
_older: WeakSet[threading.Thread] = WeakSet()


class OurThread(threading.Thread):
    """A thread of ours that may call the script's code: callbacks of futures."""


def note_loop() -> None:
    """Note that the calling thread runs the step loop."""
    global _loops  # noqa: PLW0603 - one loop a process
    _loops = threading.get_ident()


def is_scripts() -> bool:
    """Return whether what the calling thread does is no part of a step. Hot path: the loop's thread needs one comparison."""
    if threading.get_ident() == _loops or c10d.in_backward():
        return False
    thread = threading.current_thread()
    return not (isinstance(thread, OurThread) or type(thread).__name__ == _OF_CPP)


def is_older() -> bool:
    """Return whether the calling thread lived when communicators were last rebuilt, and may have work from before."""
    return threading.current_thread() in _older


def note_older() -> None:
    """Note the threads that live now: the communicators of their work are gone. An executor without a task is as good as new."""
    # No variable refers to the frames: this one is among them, and the cycle would keep what all threads have in theirs.
    idle = {
        ident
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - the only way to another thread's frame
        if _waits_for_tasks(frame)
    }
    for thread in threading.enumerate():
        if thread.ident not in idle:
            _older.add(thread)


def _waits_for_tasks(frame: FrameType) -> bool:
    """Return whether a thread of an executor is between two tasks, and none waits in the queue."""
    code = frame.f_code
    if (code.co_name, code.co_filename) != ("_worker", executors.__file__):
        return False
    queue = frame.f_locals.get("work_queue")
    return queue is not None and not queue.qsize()
