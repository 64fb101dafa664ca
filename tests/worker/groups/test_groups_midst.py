"""Aborts at any moment of collectives that are on their way, over and over: Gloo must hold nobody."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from kit.choice import often
from kit.world import FREED_S, LONG, TIMEOUT

from deadpool_run.worker.check.conformance import later

ROUNDS = 60
SIZE = 1 << 16


def gather(ours, all_ours):
    dist.all_gather_into_tensor(all_ours, ours)


def reduce(ours, all_ours):
    dist.all_reduce(all_ours)


def reduce_future(ours, all_ours):
    dist.all_reduce(all_ours, async_op=True).get_future().wait()


def reduce_scatter(ours, all_ours):
    dist.reduce_scatter_tensor(ours, all_ours)


def exchange(ours, all_ours):
    peer = 1 - dist.get_rank()
    halves = all_ours.chunk(2)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, ours, peer), dist.P2POp(dist.irecv, halves[0], peer)]):
        work.wait()


def exchange_little(ours, all_ours):
    exchange(ours[:16], all_ours[:32])


KINDS = {each.__name__: each for each in (gather, reduce, reduce_future, reduce_scatter, exchange, exchange_little)}


def aborted_over_and_over(member, kind):
    """Return the longest time from an abort until the collective was left, in seconds."""
    member.start(timeout=LONG)
    choose = random.Random(member.rank)
    longest = 0.0
    for number in range(ROUNDS):
        member.meet(f"attached {number}")  # an abort before the peer has attached would break its attach
        member.registry.begin_step()
        with later(0.002 + choose.random() * 0.004, member.registry.abort) as aborted:
            ours, all_ours = torch.ones(SIZE), torch.ones(2 * SIZE)
            while not member.registry.step_failed:
                KINDS[kind](ours, all_ours)
            freed = time.monotonic()
        longest = max(longest, freed - aborted[0])
        member.registry.attach(member.store, f"again{number}", TIMEOUT)
    return longest


@pytest.mark.parametrize("kind", often(KINDS, {"gather", "exchange"}))
def test_an_abort_in_the_midst_frees_everyone(make_world, kind):
    for longest in make_world(2).run(aborted_over_and_over, kind):
        assert longest < FREED_S
