"""Every kind of fault, in a real training: the rank is replaced, the others go on, and the weights are those of no fault."""

import signal
from itertools import product

import pytest
from kit.choice import often

RANKS = 3
STEPS = 12
VICTIM = 1
HANG_TIMEOUT_S = 2
HUNG = f"no rank has made progress for {HANG_TIMEOUT_S} s"
KINDS = {
    "gil": ("forward", HUNG),
    "sigstop": ("between", HUNG),
    "abort": ("forward", "was killed by SIGABRT"),
    "sigsegv": ("optimizer,n=5", "was killed by SIGSEGV"),
    "sigint": ("collective", "KeyboardInterrupt"),
    "sigterm": ("collective", "was killed by SIGTERM"),
    "_exit": ("between", "exited with code 7"),
    "async": ("collective", "StrayError"),
    "handler": ("optimizer,n=5", "StrayError: the alarm's handler"),
    "raise-once": ("between", "BugError"),
}
"""By kind of fault: a place, and what the launcher says. `make test-long` has each kind in all places."""
PLACES = tuple(dict.fromkeys(at for at, _ in KINDS.values()))
USUAL = [(how, KINDS[how][0]) for how in ("gil", "sigsegv", "_exit", "handler")]
"""The cases of `make test`."""


def train(cluster, *words):
    return cluster(
        *("--steps", str(STEPS), *words),
        script="hanging.py",
        nproc=RANKS,
        spares=1,
        options=("--hang-timeout", str(HANG_TIMEOUT_S)),
    )


def check(job, unfailed, lost):
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(unfailed)
    job.account.check_ranks(lost, RANKS)
    job.account.check_one_at_a_time()
    job.account.check_steps_repeated(job.effects())
    job.check_nothing_left()


@pytest.mark.parametrize(("how", "at"), often(product(KINDS, PLACES), USUAL))
def test_a_rank_that_fails_is_replaced(cluster, unfailed, how, at):
    job = train(cluster, "--die", f"rank={VICTIM},step=5,at={at},how={how}")
    check(job, unfailed, [VICTIM])
    assert len(job.account.of("dying", rank=VICTIM, how=how)) == 1
    assert KINDS[how][1] in job.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGABRT])
def test_a_rank_that_is_sent_a_signal_is_replaced(cluster, unfailed, number):
    """From outside, while it waits in a collective for a rank that comes later."""
    job = train(cluster, "--hold", "5")
    job.wait_event("held")
    job.kill(VICTIM, number)
    job.release()
    check(job, unfailed, [VICTIM])
