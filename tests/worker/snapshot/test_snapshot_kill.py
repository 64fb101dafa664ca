"""A worker that trains and captures is killed at random moments; whoever holds the slots finds whole snapshots only."""

import random
import time

import pytest
from snapshot_kit import Child, capture
from snapshot_large import Large, trains_for_ever

from deadpool_run.vault.segments import complete_version, read_header, read_manifest
from deadpool_run.vault.status_page import BUSY

pytestmark = pytest.mark.usefixtures("copied")


def _spin_until(condition, limit_s=30.0):
    """Look as often as possible: what is waited for lasts milliseconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"


def _delay(seconds):
    end = time.monotonic() + seconds
    _spin_until(lambda: time.monotonic() >= end)


@pytest.mark.parametrize("chance", range(8))
def test_what_a_killed_worker_leaves_is_whole(slots, chance):
    dice = random.Random(chance)
    child = Child(trains_for_ever, slots.gift())
    rank_entry = slots.status_page.rank_entries[0]
    least = dice.randrange(1, 9)
    _spin_until(lambda: max(rank_entry.slots) >= least)
    if chance % 2:  # in the middle of a copy
        _spin_until(lambda: BUSY in rank_entry.slots)
    _delay(dice.uniform(0, 0.006))
    child.kill()

    both = zip(slots.fds[0], rank_entry.slots, strict=True)
    held = tuple(sorted(version for fd, version in both if complete_version(fd) == version))
    assert held == rank_entry.held
    assert held, f"no snapshot survived: {rank_entry.slots}"
    assert max(held) >= least - 1
    assert len(held) == 2 or BUSY in rank_entry.slots
    for slot, said in enumerate(rank_entry.slots):
        if said == BUSY and (header := read_header(slots.fds[0][slot])) is not None:
            # Killed between the header and the status page: whole, but it does not count.
            assert header.version in (BUSY, max(held) + 1, max(held) - 1)
    again = Large()
    for version in held:
        while again.version < version:
            again.step()
        found = slots.tensors(version)
        assert found == again.tensors(), f"snapshot {version} is not the state after {version} steps"
        fd = slots.fds[0][rank_entry.slots.index(version)]
        assert read_manifest(fd, version).values["rng"]


def test_a_successor_takes_over_a_half_written_slot(slots):
    child = Child(trains_for_ever, slots.gift())
    rank_entry = slots.status_page.rank_entries[0]
    _spin_until(lambda: max(rank_entry.slots) >= 4)
    _spin_until(lambda: BUSY in rank_entry.slots)
    child.kill()
    newest = max(rank_entry.held)
    large = Large()
    snapshots = slots.own()
    assert BUSY not in rank_entry.slots
    snapshots.protect("model", large.model)
    snapshots.protect("optimizer", large.optimizer)
    snapshots.restore(newest)
    large.version = newest
    for _ in range(2):
        snapshots.wait()
        large.step()
        capture(snapshots, large.version)
    snapshots.close()
    assert rank_entry.held == (newest + 1, newest + 2)
    again = Large()
    while again.version < newest + 2:
        again.step()
    assert slots.tensors(newest + 2) == again.tensors()
