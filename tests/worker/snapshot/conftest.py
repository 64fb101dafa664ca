import pytest

from deadpool_run.worker.snapshot import copy_thread


@pytest.fixture(params=["at once", "on the thread"])
def copied(request, monkeypatch):
    """Small states are copied at once; have them copied on the thread, as large ones, too."""
    if request.param == "on the thread":
        monkeypatch.setattr(copy_thread, "_SMALL_BYTES", 0)
