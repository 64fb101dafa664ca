"""Slots are copied for a durable checkpoint while their rank trains on: what is copied is one version, or nothing."""

import os
import time

from snapshot_kit import Child, capture
from snapshot_large import Large, trains_for_ever

from deadpool_run.vault.segments import complete_version, mark_busy, read_header, write_header
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.worker.checkpoint.slots import copy_kept, rooms

COPIES = 40


def test_a_copy_is_of_one_version_while_the_rank_trains_on(slots):
    worker = Child(trains_for_ever, slots.gift())
    deadline = time.monotonic() + 30
    while slots.status_page.committed() is None or slots.status_page.committed() < 2:
        assert time.monotonic() < deadline
        time.sleep(0)
    found = []
    for _ in range(COPIES):
        copy = copy_newest(slots)
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


def copy_newest(slots):
    """Copy the committed version as a checkpointer does, again if the rank had begun to overwrite it."""
    lent, deadline = {0: slots.fds[0]}, time.monotonic() + 30
    while True:
        slots.status_page.kept = version = slots.status_page.committed()
        copies = copy_kept(slots.status_page, lent, version, rooms(lent))
        if copies is not None:
            return copies[0]
        assert time.monotonic() < deadline


def test_a_version_that_is_kept_stays_until_it_is_let_go(slots):
    skipped = []
    snapshots = slots.own(on_skip=lambda version, _: skipped.append(version))
    for version in range(2):
        assert snapshots.capture_now(version)
    slots.status_page.kept = 0
    capture(snapshots, 2)
    assert snapshots.held() == (0, 1)
    assert skipped == [2]
    slots.status_page.kept = EMPTY
    assert snapshots.capture_now(3)
    assert snapshots.held() == (1, 3)


def test_a_version_that_is_written_again_while_it_is_copied_is_not_taken(slots, monkeypatch):
    assert slots.own().capture_now(0)
    lent, preadv = {0: slots.fds[0]}, os.preadv
    (fd,) = (fd for fd in slots.fds[0] if complete_version(fd) == 0)

    def read_and_write_again(*args):
        write_header(fd, read_header(fd))  # of the same version and layout
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", read_and_write_again)
    slots.status_page.kept = 0
    assert copy_kept(slots.status_page, lent, 0, rooms(lent)) is None


def test_a_slot_that_is_being_written_is_not_copied(slots):
    """The status page says that it holds a version, the header that it is being written: a writer that is quicker."""
    lent = {0: slots.fds[0]}
    mark_busy(slots.fds[0][0])
    slots.status_page.rank_entries[0].set_slot(0, 3)
    slots.status_page.kept = 3
    assert copy_kept(slots.status_page, lent, 3, rooms(lent)) is None
    assert slots.status_page.kept == EMPTY
