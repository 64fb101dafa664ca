"""Marks: a step that is run again must send what it sent before, and a replacement what the rank's last owner sent."""

import os

import pytest
import torch

from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.worker.transcript.step_digests import Marks


@pytest.fixture
def rank_entry():
    fd = create_status_page(1)
    status_page = StatusPage(fd, 1)
    yield status_page.rank_entries[0]
    status_page.close()
    os.close(fd)


def sent(seed):
    return [torch.randn(100, generator=torch.Generator().manual_seed(seed))]


def test_the_same_step_has_the_same_mark(rank_entry):
    marks = Marks(rank_entry)
    for step, seed, same in ((4, 1, True), (5, 2, True), (4, 1, True), (5, 3, False)):
        marks.begin_step(step, marking=True)
        assert marks.put(sent(seed)) is same
        assert not marks.open


def test_a_replacement_is_held_against_the_last_owner(rank_entry):
    owner = Marks(rank_entry)
    owner.begin_step(7, marking=True)
    owner.put(sent(1))
    rank_entry.clear(keep_slots=True)
    for seed, same in ((1, True), (2, False)):
        replacement = Marks(rank_entry)
        replacement.inherit(rank_entry)
        replacement.begin_step(7, marking=True)
        assert replacement.put(sent(seed)) is same


def test_flags_and_whole_numbers_mark_nothing(rank_entry):
    marks = Marks(rank_entry)
    marks.begin_step(3, marking=True)
    for small in (torch.rand(3), torch.arange(100)):
        assert marks.put([small])
        assert marks.open
    assert not rank_entry.marked_step
