"""The contract of every external authority."""

import random

import pytest

from deadpool_run.agent.authority.claim import LeaderClaim, RunEnd

NAMES = ("a", "b", "c", "d")


def claim(term, node="n", run_id="run"):
    return LeaderClaim(term, node, "10.0.0.1", 29400, run_id)


def test_a_claim_is_recorded_and_read_by_others(place):
    assert place.authority().read().claim is None
    assert place.authority().claim(claim(0))
    assert place.authority().read().claim == claim(0)


def test_terms_never_go_back_and_may_leave_gaps(place):
    authority = place.authority()
    assert authority.claim(claim(3))
    assert not authority.claim(claim(2))
    assert not authority.claim(claim(3, "other"))
    assert authority.claim(claim(7, "other"))
    assert not authority.claim(claim(3)), "it is recorded, but not the newest"
    assert authority.read().claim == claim(7, "other")


def test_a_claim_that_is_repeated_is_granted_again(place):
    assert place.authority().claim(claim(1))
    assert place.authority().claim(claim(1))
    assert not place.authority().claim(LeaderClaim(1, "n", "10.0.0.1", 29401, "run"))


@pytest.mark.parametrize("other", ["run2", "RUN", "r-u-n", "run/../run", "r\u00fcn", "", "x" * 300])
def test_runs_are_separate(place, other):
    assert place.authority().claim(claim(5))
    assert place.authority(other).read().claim is None
    assert place.authority(other).claim(claim(0, run_id=other))
    place.authority(other).close_run(RunEnd(0, "done"))
    assert place.authority().read().claim == claim(5)
    assert place.authority().read().end is None


def test_a_run_that_is_over_has_no_leader_any_more(place):
    authority = place.authority()
    assert authority.claim(claim(4))
    assert authority.read().end is None
    authority.close_run(RunEnd(3, "rank 1 failed"))
    authority.close_run(RunEnd(0, "said later"))
    assert place.authority().read().end == RunEnd(3, "rank 1 failed")
    assert not authority.claim(claim(5))
    assert authority.read().claim == claim(4)


@pytest.mark.parametrize("reason", ["rank 1 raised \udc80", "\0 \u2028 \N{SNOWMAN}", "x" * 5000])
def test_the_reason_of_an_end_may_be_any_text(place, reason):
    place.authority().close_run(RunEnd(1, reason))
    assert place.authority().read().end == RunEnd(1, reason)


def test_a_run_may_end_before_its_first_claim(place):
    place.authority().close_run(RunEnd(2, "no such script"))
    assert place.authority().read().end == RunEnd(2, "no such script")
    assert not place.authority().claim(claim(0))
    assert place.authority().read().claim is None


def test_of_many_processes_that_claim_a_term_one_wins(place):
    with place.claimers() as claimers:
        claimers.start(*NAMES)
        for term in range(25):
            (winner,) = claimers.claim(term)
            assert place.authority().read().claim.node == winner
        assert claimers.claim(10) == []


def test_processes_that_race_through_the_terms_agree_on_each_leader(place):
    with place.claimers() as claimers:
        claimers.start(*NAMES)
        claimers.race(25)
        assert sorted(claimers.leaders) == list(range(len(claimers.leaders)))
        assert len(claimers.wins) >= 25


def test_processes_that_are_killed_leave_the_others_able_to_go_on(place):
    chance = random.Random(20260722)
    with place.claimers() as claimers:
        claimers.start(*NAMES)
        claimers.order("race 1000000")
        for number in range(5):
            for _ in range(chance.randrange(1, 30)):
                name, _ = claimers.report()
            claimers.kill(name)
            claimers.start(f"{name[0]}{number}")
            claimers.order("race 1000000", f"{name[0]}{number}")
        before = len(claimers.wins)
        while len(claimers.wins) < before + 10:
            claimers.report()
    assert place.authority().claim(claim(place.authority().read().claim.term + 1))
