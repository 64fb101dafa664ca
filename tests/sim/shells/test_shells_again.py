"""Real agents in virtual time: a leader that is elected again in a later term, while nobody led in between."""

from contextlib import contextmanager

import pytest
from shell_job import T
from stories import BOUND_S, Story, settings
from surroundings import simulated

from deadpool_run.core import events as ev
from deadpool_run.core.leadership import electorate as el
from deadpool_run.vault.checkpoint_format import CheckpointStep
from deadpool_run.wire import peers
from deadpool_run.wire.checkpoints import DurableSpec, StepTaken


@contextmanager
def led_again(meanwhile=lambda _made, _leader: None, *, before=lambda _made: None):
    """Yield a job whose first leader leads again, in term 2, and that leader.

    The voters were cut off from each other: one voted for another in term 1, which never led. `before` is called just before
    the cut, and `meanwhile` just after it, while the leader still holds a lease.
    """
    with simulated(1, 4, settings(4), Story) as made:
        for name in made.network.machines:
            made.start(name)
        made.until(lambda: made.leader is not None, 10, "the job is founded")
        made.settle(BOUND_S)
        made.only_calm = False
        first, leader = made.leader[0], made.leader[0].member.leader
        configuration = first.election.configuration
        mine, candidate, voter = configuration.voters
        pairs = [(one, other) for one in configuration.voters for other in configuration.voters if one != other]
        before(made)
        made.network.cut(pairs)
        first.loop.inside(
            leader.submit, ev.TimeAdvanced()
        )  # no other voter has this entry, so that none of them can win
        meanwhile(made, leader)
        made.until(lambda: not first.holds_lease(), BOUND_S, "the leader lacks a lease")

        def hear(name, *vote, log, voted_term, pre_vote):
            agent = made.agent_on(name)
            asked = el.VoteAsked(*vote, configuration.index, el.LogIndex(0, log), voted_term, pre_vote=pre_vote)
            agent.loop.inside(agent.member.leadership.handle, asked)
            return agent.election

        made.until(
            lambda: hear(voter, 1, candidate, log=1 << 30, voted_term=0, pre_vote=False).voted_term == 1, T, "it votes"
        )
        hear(mine, 2, voter, log=0, voted_term=1, pre_vote=True)  # before the voter's connection is there again
        assert first.election.role is el.ElectionRole.FOLLOWER
        made.network.heal([pair for pair in pairs if candidate not in pair])
        made.until(first.holds_lease, BOUND_S, "it is elected again")
        made.network.heal([pair for pair in pairs if candidate in pair])
        assert first.election.term == 2
        assert first.member.leader is leader
        yield made, leader


def test_a_leader_that_leads_again_goes_on_with_all_nodes():
    with led_again() as (made, _):
        made.settle(BOUND_S)
        assert set(made.terms) == {0, 2}
        assert not any(incident.losses for incident in made.state.incidents)
        made.finish()
        made.check_nothing_left()


@pytest.mark.parametrize("late", [False, True])
def test_a_leader_that_leads_again_tells_nodes_what_they_may_have_missed(late):
    """A message about copies was lost with a connection of the earlier term. It counted as sent: nothing was committed again.

    `late`: other copies were needed while it had no lease, and it sent the message when it led again.
    """

    def refuse(made, leader):
        agent = made.leader[0]
        if late:
            made.until(lambda: not agent.holds_lease(), BOUND_S, "the leader lacks a lease")
        rank, (holder, *_) = next(each for each in enumerate(leader.state.buddies) if made.homes[each[0]] == agent.node)
        agent.loop.inside(leader.submit, ev.CopyRefused(holder, rank))

    with led_again(refuse) as (made, _):
        made.settle(BOUND_S)


@pytest.mark.parametrize("step", list(CheckpointStep))
def test_a_leader_that_leads_again_waits_for_no_node_that_has_given_a_checkpoint_up(step):
    """No other checkpoint followed, and the end of the job waited for this one."""

    def write(made, leader):
        inside, durable = made.leader[0].loop.inside, leader.durable
        durable.spec = durable._schedule.spec = DurableSpec(target="/kept", every_steps=1)
        inside(durable._schedule.begin)
        inside(durable.check)
        attempt = durable._attempt
        while attempt.step is not step:
            taken = StepTaken(attempt.step, "", 0)
            for node in attempt.waiting - {leader.here}:
                inside(durable.saved, node, peers.Saved(attempt.name, taken))
            if leader.here in attempt.waiting:
                inside(leader.node.participant._checkpointer._answered, taken)
        attempts.append(attempt)

    attempts = []
    with led_again(write) as (made, leader):
        made.until(lambda: leader.durable._attempt not in attempts, T, "it is void")
        made.until(lambda: leader.durable._attempt is not None, BOUND_S, "another one is begun")


def test_a_leader_that_leads_again_ends_the_job_that_had_ended():
    """It waited for voters to confirm what it had sent them by connections of the earlier term."""

    def end(made):
        made.steps = max(worker.completed for worker in made.workers.values()) + 3
        made.until(lambda: made.stopped is not None, BOUND_S, "the leader decides that the job has ended")

    with led_again(before=end) as (made, _):
        made.until(lambda: not made.living(), BOUND_S, "all agents end")
        assert {agent.exit_code for agent in made.agents} == {0}
