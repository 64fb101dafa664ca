"""The board where a job spans nodes: the agent says what is committed, and mirrors the cells of other nodes."""

import os

import pytest

from deadpool_run.vault.segments import free_slot
from deadpool_run.vault.status_page import EMPTY, MAX_ABANDONED, Board, Phase, create_board


@pytest.fixture
def boards():
    fds = [create_board(3), create_board(3)]
    made = [Board(fd, 3) for fd in fds]
    yield made
    for board, fd in zip(made, fds, strict=True):
        board.close()
        os.close(fd)


def test_until_an_agent_says_something_the_cells_do(boards):
    board, _ = boards
    assert board.committed() is None
    for cell in board.cells:
        cell.set_slot(0, 4)
    assert board.committed() == 4
    board.cells[0].set_slot(1, 6)
    board.cells[1].skipped = 5
    board.cells[2].set_slot(1, 5)
    assert board.abandoned() == {5}


def test_what_an_agent_says_counts_more_than_the_cells(boards):
    board, _ = boards
    for cell in board.cells:
        cell.set_slot(0, 4)
        cell.skipped = 5
    board.tell(None, ())
    assert (board.committed(), board.abandoned()) == (None, set())
    board.tell(3, {5, 7})
    assert (board.committed(), board.abandoned()) == (3, {5, 7})
    board.tell(7, {8})
    assert (board.committed(), board.abandoned()) == (7, {8})
    assert free_slot((7, 8), board.committed(), board.abandoned()) == 1
    board.tell(0, ())
    assert (board.committed(), board.abandoned()) == (0, set())


def test_of_many_abandoned_versions_the_newest_are_kept(boards):
    board, _ = boards
    board.tell(0, range(1, 200))
    assert board.abandoned() == set(range(200 - MAX_ABANDONED, 200))
    assert [cell.slots for cell in board.cells] == [(EMPTY, EMPTY)] * 3, "the list ends before the cells"


def test_a_mirrored_cell_shows_what_it_is_of_but_nobody_waits_for_its_copies(boards):
    here, there = boards
    cell = there.cells[1]
    cell.worker, cell.phase, cell.completed, cell.skipped, cell.copying = 9, Phase.STEP, 12, 11, 1
    cell.set_slot(1, 12)
    here.mirror(1, cell.words())
    seen = here.cells[1]
    assert (seen.worker, seen.phase, seen.completed, seen.skipped, seen.slots) == (9, Phase.STEP, 12, 11, (EMPTY, 12))
    assert seen.copying == 0
    assert here.cells[0].words() != seen.words()
    with pytest.raises(ValueError, match="16 words"):
        here.mirror(1, (1, 2))
