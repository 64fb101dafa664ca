"""Slots are copied for a durable checkpoint while their rank trains on: what is copied is one version, or nothing."""

import time

import pytest
import torch
from snapshot_kit import Child, Slots
from snapshot_large import Large, trains_for_ever

from deadpool_run.errors import CheckpointError
from deadpool_run.vault.checkpoint_format import NOTHING
from deadpool_run.vault.segments import mark_busy
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.worker.checkpoint import slots as durable_slots
from deadpool_run.worker.checkpoint.slots import copy_committed

COPIES = 40


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def slots(_warm):
    made = Slots()
    yield made
    made.close()


def test_a_copy_is_of_one_version_while_the_rank_trains_on(slots):
    worker = Child(trains_for_ever, slots.gift())
    deadline = time.monotonic() + 30
    while slots.status_page.committed() is None or slots.status_page.committed() < 2:
        assert time.monotonic() < deadline
        time.sleep(0)
    found = []
    for _ in range(COPIES):
        (copy,) = copy_committed(slots.status_page, {0: slots.fds[0]}, NOTHING)
        entries = copy.manifest.tensors
        found.append((copy.header.version, {e.name: copy.raw(e.offset, e.nbytes) for e in entries}))
    worker.kill()
    again = Large()
    for version, tensors in found:
        while again.version < version:
            again.step()
        assert tensors == again.tensors(), f"a copy of version {version} is not that version"
    assert found[-1][0] > found[0][0], "the rank did not train while it was copied"
    assert slots.status_page.kept == EMPTY


def test_a_version_that_is_kept_stays_until_it_is_let_go(slots):
    skipped = []
    snapshots = slots.own(on_skip=skipped.append)
    for version in range(2):
        assert snapshots.capture_now(version)
    slots.status_page.kept = 0
    snapshots.begin(2)
    snapshots.wait()
    assert snapshots.held() == (0, 1)
    assert skipped == [2]
    slots.status_page.kept = EMPTY
    assert snapshots.capture_now(3)
    assert snapshots.held() == (1, 3)
    snapshots.close()


def test_only_a_newer_version_is_copied(slots):
    rank_entry = slots.status_page.rank_entries[0]
    assert copy_committed(slots.status_page, {0: slots.fds[0]}, NOTHING) is None
    rank_entry.set_slot(0, 3)
    assert copy_committed(slots.status_page, {0: slots.fds[0]}, 3) is None


def test_a_slot_that_never_stands_is_given_up(slots, monkeypatch):
    """The status page says that it holds a version, the header that it is being written: a writer that is always quicker."""
    monkeypatch.setattr(durable_slots, "COPY_TIMEOUT_S", 0.1)
    mark_busy(slots.fds[0][0])
    slots.status_page.rank_entries[0].set_slot(0, 3)
    with pytest.raises(CheckpointError, match="every copy was overwritten before it was complete"):
        copy_committed(slots.status_page, {0: slots.fds[0]}, NOTHING)
