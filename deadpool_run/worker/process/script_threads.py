"""Threads of the script: those that it or a library starts through `threading`, and their collectives.

Such a collective belongs to no step: a background checkpoint runs through several, and nothing discards what it reads.
The main thread is none, and mostly runs the step loop. Threads that C++ starts (autograd's, Gloo's) and our own run parts of a
step, and so does a backward pass in any thread.
"""

import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import thread as executors
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from deadpool_run.worker.compat import c10d

_OF_CPP = "_DummyThread"
"""The name of Python's class for threads that it has not started."""
_OF_TQDM = "TMonitor"
"""The name of tqdm's class for the thread that looks at progress bars."""
_NAMES = "deadpool-"
"""How the names of our own threads begin."""

_loops = threading.main_thread().ident
_older: WeakKeyDictionary[threading.Thread, weakref.ref[object] | None] = WeakKeyDictionary()
"""Threads that lived when communicators were last rebuilt. Each has the executor's task that it ran; None: all that it does is older."""


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
    if thread is threading.main_thread():  # it waits while the loop runs in another thread
        return False
    return not (isinstance(thread, OurThread) or type(thread).__name__ == _OF_CPP)


def are_running() -> bool:
    """Return whether there are threads of the script, or of libraries that it uses, which may share objects with it."""
    return any(
        thread.ident != _loops and thread is not threading.main_thread() and not _is_alone(thread)
        for thread in threading.enumerate()
    )


def _is_alone(thread: threading.Thread) -> bool:
    return thread.name.startswith(_NAMES) or type(thread).__name__ in (_OF_CPP, _OF_TQDM)


def is_older() -> bool:
    """Return whether the calling thread is at what it did when communicators were last rebuilt."""
    thread = threading.current_thread()
    if thread not in _older:
        return False
    task = _older[thread]
    return task is None or task() is _task_of(sys._getframe())  # noqa: SLF001 - this thread's frame


def note_older() -> None:
    """Note what the threads that live now are doing: its communicators are gone. An executor without a task is as good as new."""
    # First, because a task that leaves the queue from here on is in the frames.
    queued = {thread for thread in threading.enumerate() if _has_queue(thread)}
    # No variable refers to the frames: this one is among them, and the cycle would keep what all threads have in theirs.
    doing = {
        ident: (_waits_for_tasks(frame), _task_of(frame))
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - the only way to another thread's frame
    }
    for thread in threading.enumerate():
        is_idle, task = doing.get(thread.ident or 0, (False, None))
        if is_idle and thread not in queued:
            _older.pop(thread, None)
        else:
            _older[thread] = None if task is None or thread in queued else weakref.ref(task)


def _has_queue(thread: threading.Thread) -> bool:
    """Return whether tasks wait for an executor's thread. Its frame has the queue too, but a look there may keep the task."""
    queues: Mapping[threading.Thread, Any] = getattr(executors, "_threads_queues", {})
    queue = queues.get(thread)
    return queue is not None and queue.qsize() > 0


def _waits_for_tasks(frame: FrameType) -> bool:
    """Return whether a thread of an executor is between two tasks."""
    return _is_executors(frame, "_worker") and "work_item" not in frame.f_locals


def _task_of(frame: FrameType | None) -> object | None:
    """Return the task of an executor in which a thread is."""
    while frame is not None and not _is_executors(frame, "run"):
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


def _is_executors(frame: FrameType, name: str) -> bool:
    return (frame.f_code.co_name, frame.f_code.co_filename) == (name, executors.__file__)
