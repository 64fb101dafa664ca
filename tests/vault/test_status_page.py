"""The status page where a job spans nodes: the agent says what is committed, and mirrors the rank entries of other nodes."""

import os

import pytest

from deadpool_run.vault.segments import free_slot
from deadpool_run.vault.status_page import (
    EMPTY,
    MAX_ABANDONED,
    WORDS,
    Phase,
    StatusPage,
    create_status_page,
)


@pytest.fixture
def status_pages():
    fds = [create_status_page(3), create_status_page(3)]
    made = [StatusPage(fd, 3) for fd in fds]
    yield made
    for status_page, fd in zip(made, fds, strict=True):
        status_page.close()
        os.close(fd)


def test_until_an_agent_says_something_the_rank_entries_do(status_pages):
    status_page, _ = status_pages
    assert status_page.committed() is None
    for rank_entry in status_page.rank_entries:
        rank_entry.set_slot(0, 4)
    assert status_page.committed() == 4
    status_page.rank_entries[0].set_slot(1, 6)
    status_page.rank_entries[1].skipped = 5
    status_page.rank_entries[2].set_slot(1, 5)
    assert status_page.abandoned() == {5}


def test_what_an_agent_says_counts_more_than_the_rank_entries(status_pages):
    status_page, _ = status_pages
    for rank_entry in status_page.rank_entries:
        rank_entry.set_slot(0, 4)
        rank_entry.skipped = 5
    status_page.publish(None, ())
    assert (status_page.committed(), status_page.abandoned()) == (None, set())
    status_page.publish(3, {5, 7})
    assert (status_page.committed(), status_page.abandoned()) == (3, {5, 7})
    status_page.publish(7, {8})
    assert (status_page.committed(), status_page.abandoned()) == (7, {8})
    assert free_slot((7, 8), status_page.committed(), status_page.abandoned()) == 1
    status_page.publish(0, ())
    assert (status_page.committed(), status_page.abandoned()) == (0, set())


def test_of_many_abandoned_versions_the_newest_are_kept(status_pages):
    status_page, _ = status_pages
    status_page.publish(0, range(1, 200))
    assert status_page.abandoned() == set(range(200 - MAX_ABANDONED, 200))
    assert [rank_entry.slots for rank_entry in status_page.rank_entries] == [(EMPTY, EMPTY)] * 3, (
        "the list ends before the rank entries"
    )


def test_words_that_are_read_at_once_are_those_of_the_rank_entries(status_pages):
    here, there = status_pages
    for at, rank_entry in enumerate(there.rank_entries):
        rank_entry.mirror([100 * at + word for word in range(WORDS)])
        rank_entry.taken, rank_entry.copying, rank_entry.growing = 71, 72, 73
    read = list(there.words())
    assert read == [rank_entry.words() for rank_entry in there.rank_entries]
    assert [words[6:8] for words in read] == [(6, 7), (106, 107), (206, 207)]
    assert list(here.words()) == [rank_entry.words() for rank_entry in here.rank_entries]


def test_a_mirrored_rank_entry_shows_what_it_is_of_but_nobody_waits_for_its_copies(status_pages):
    here, there = status_pages
    rank_entry = there.rank_entries[1]
    rank_entry.worker, rank_entry.phase, rank_entry.completed, rank_entry.skipped, rank_entry.copying = (
        9,
        Phase.STEP,
        12,
        11,
        1,
    )
    rank_entry.set_slot(1, 12)
    rank_entry.taken = 4096
    here.rank_entries[1].mirror(rank_entry.words())
    seen = here.rank_entries[1]
    assert (seen.worker, seen.phase, seen.completed, seen.skipped, seen.slots) == (9, Phase.STEP, 12, 11, (EMPTY, 12))
    assert seen.copying == 0
    assert here.taken == 0, "it is the memory of another node"
    assert here.rank_entries[0].words() != seen.words()
    with pytest.raises(ValueError, match=f"{WORDS} words"):
        here.rank_entries[1].mirror((1, 2))
