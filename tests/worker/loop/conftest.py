"""Loaders whose workers are gone when a test ends."""

from multiprocessing.queues import Queue

import pytest


@pytest.fixture(autouse=True)
def _queues_end(monkeypatch):
    """A loader's queue closes its pipe on a thread that nobody waits for; the check for leaks would see it."""
    close = Queue.close

    def closed(queue):
        close(queue)
        if queue._thread is not None:
            queue._thread.join(10)

    monkeypatch.setattr(Queue, "close", closed)
