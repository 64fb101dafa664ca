"""The slot rule: whatever ranks do and whoever dies, some version that all had stays whole, and nobody starves."""

import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from deadpool_run.vault.segments import free_slot
from deadpool_run.vault.status_page import BUSY, EMPTY, StatusPage, create_status_page

RANKS = 3


class Ranks(RuleBasedStateMachine):
    """Ranks that capture in lockstep, as training makes them: a rank ends step k when all have begun to.

    Each rank looks at the status page and writes at moments of its own; nothing tells it when.
    """

    @staticmethod
    def choose(slots, committed, status_page):
        return free_slot(slots, committed, status_page.abandoned())

    def __init__(self):
        super().__init__()
        self.fd = create_status_page(RANKS)
        self.status_page = StatusPage(self.fd, RANKS)
        self.version = [0] * RANKS  # that each rank has ended
        self.waits = [True] * RANKS  # it waits for a slot for that version
        self.writing = [None] * RANKS
        self.best = EMPTY

    def teardown(self):
        self.status_page.close()
        os.close(self.fd)

    @rule(rank=st.integers(0, RANKS - 1))
    def end_step(self, rank):
        if self.writing[rank] is not None:
            self.finish(rank)  # the optimizer waits for the copy
        if min(self.version) < self.version[rank]:
            return  # its peers are still in the step before
        if self.waits[rank]:
            self.look(rank)
            if self.waits[rank]:
                self.status_page.rank_entries[rank].skipped = self.version[rank]
            elif self.writing[rank] is not None:
                self.finish(rank)
        self.version[rank] += 1
        self.waits[rank] = True

    @rule(rank=st.integers(0, RANKS - 1))
    def look(self, rank):
        if not self.waits[rank]:
            return
        slots = self.status_page.rank_entries[rank].slots
        slot = self.choose(slots, self.status_page.committed(), self.status_page)
        if slot is not None:
            self.waits[rank] = False
            self.writing[rank] = slot
            self.status_page.rank_entries[rank].set_slot(slot, BUSY)

    @precondition(lambda self: any(slot is not None for slot in self.writing))
    @rule(rank=st.integers(0, RANKS - 1))
    def finish(self, rank):
        slot = self.writing[rank]
        if slot is not None:
            self.writing[rank] = None
            self.status_page.rank_entries[rank].set_slot(slot, self.version[rank])
            self.note()

    @rule(rank=st.integers(0, RANKS - 1))
    def skip(self, rank):
        """For whatever reason: an interruption, or weights that were written during the copy."""
        if self.waits[rank]:
            self.waits[rank] = False
            self.status_page.rank_entries[rank].skipped = self.version[rank]

    @rule(rank=st.integers(0, RANKS - 1))
    def pass_over(self, rank):
        """Without a word: its capture interval is another one for a moment."""
        self.waits[rank] = False

    @rule(rounds=st.just(4))
    def calm_stretch(self, rounds):
        """When nobody is late, what is committed follows what is done."""
        for rank in range(RANKS):
            while self.version[rank] < max(self.version):
                self.end_step(rank)
        before = max(self.version)
        for _ in range(rounds):
            for rank in range(RANKS):
                self.end_step(rank)
            for rank in range(RANKS):
                self.look(rank)
            for rank in range(RANKS):
                self.finish(rank)
        assert (self.status_page.committed() or 0) >= before, (
            f"starved: {[rank_entry.slots for rank_entry in self.status_page.rank_entries]}"
        )

    def note(self):
        self.best = max(self.best, EMPTY if self.status_page.committed() is None else self.status_page.committed())

    @invariant()
    def what_was_committed_stays(self):
        """Any rank may die at any moment: what it is writing is lost, the rest must do."""
        now = self.status_page.committed()
        assert (EMPTY if now is None else now) >= self.best, (
            f"{self.best} is lost: {[c.slots for c in self.status_page.rank_entries]}"
        )


BOUNDS = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_the_rule():
    run_state_machine_as_test(Ranks, settings=BOUNDS)


def overwrites_the_committed(slots, committed, status_page):
    newest = EMPTY if committed is None else committed
    lost = status_page.abandoned()
    return next((slot for slot, version in enumerate(slots) if version <= newest or version in lost), None)


def overwrites_the_oldest(slots, _committed, _status_page):
    return min((version, slot) for slot, version in enumerate(slots))[1]


def deaf_to_skips(slots, committed, _status_page):
    return free_slot(slots, committed, set())


def hears_announcements_only(slots, committed, status_page):
    return free_slot(slots, committed, status_page.skipped())


@pytest.mark.parametrize(
    "bug", [overwrites_the_committed, overwrites_the_oldest, deaf_to_skips, hears_announcements_only]
)
def test_a_broken_rule_is_found(bug):
    broken = type("Broken", (Ranks,), {"choose": staticmethod(bug)})
    with pytest.raises(AssertionError, match=r"is lost|starved"):
        run_state_machine_as_test(broken, settings=settings(BOUNDS, phases=[Phase.generate]))


@pytest.mark.parametrize(
    ("slots", "committed", "abandoned", "chosen"),
    [
        ((EMPTY, EMPTY), None, set(), 0),
        ((0, EMPTY), None, set(), 1),
        ((0, 1), None, set(), None),
        ((0, 1), 0, set(), None),
        ((0, 1), 1, set(), 0),
        ((2, 1), 2, set(), 1),
        ((2, BUSY), 2, set(), 1),
        ((2, 3), 2, {3}, 1),
        ((2, 3), 2, {2}, None),  # of an older time: all have 2 by now
        ((2, 3), None, {2}, 0),
    ],
)
def test_which_slot_is_free(slots, committed, abandoned, chosen):
    assert free_slot(slots, committed, abandoned) == chosen
