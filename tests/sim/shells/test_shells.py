"""Real agents in virtual time: swarms of stories, and single faults.

`SHELLS_SEED=n` runs the story of that seed instead of stories of new seeds.
"""

import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import search_shells
from shell_job import PORT
from stories import BOUND_S, KINDS, Story, T, settings, tell
from surroundings import simulated
from virtual_loop import VirtualLoop
from workers import Mode

from deadpool_run.coordinator.log_follower import LogFollower
from deadpool_run.core import events as ev
from deadpool_run.core.leadership import quorum
from deadpool_run.core.leadership.electorate import ElectionRole
from deadpool_run.errors import ProtocolError
from deadpool_run.transport import handshake
from deadpool_run.transport.connections import Connections
from deadpool_run.transport.link import PeerLink
from deadpool_run.wire import peers
from deadpool_run.wire.auth import ConnectionRole

SEEDS = 12
NEW = 4
LONG = 120


def run(seed, kind):
    try:
        return tell(seed, kind)
    except AssertionError as error:
        raise AssertionError(f"{error}\nagain: SHELLS_SEED={seed} pytest {__file__} -k 'new and {kind}'") from error


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_swarm_of_stories(kind, part):
    for seed in range(part, SEEDS, 2):
        run(seed, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_stories_of_new_seeds(kind):
    given = os.environ.get("SHELLS_SEED")
    for seed in [int(given)] if given else [secrets.randbits(32) for _ in range(NEW)]:
        run(seed, kind)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_long_swarm_of_stories(kind):
    first = secrets.randbits(32)
    for seed in range(first, first + LONG):
        run(seed, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_stories(kind):
    assert tell(3, kind) == tell(3, kind)


def test_the_search_runs_as_make_starts_it():
    """It does not need the module path of pytest."""
    command = [sys.executable, search_shells.__file__, "--seed", "3", "--kind", KINDS[0]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("1 stories of agents, 0 failures\n")


@pytest.mark.parametrize("seed", [67, 76])
def test_a_node_whose_connection_breaks_as_it_rejoins_gets_its_orders(seed):
    """They were lost with that connection, and the repair's wait for the node timed out."""
    run(seed, "hard")


def test_a_node_that_wakes_up_stops_its_workers_before_it_obeys_an_old_order():
    """The order had waited in the socket, while the rank was given to another worker."""
    run(160708319, "wild")


def test_a_leader_counts_inventories_that_arrived_while_it_had_no_authority():
    """The deadline of the takeover had passed, and was handled before the inventory that had waited."""
    run(308484255, "wild")


def test_a_pause_of_all_machines_after_a_short_cut_of_the_leader_causes_no_election():
    """The voters did not notice a pause that ended shortly after their next deadline, and elected another leader."""
    run(1670546040, "calm")


@pytest.mark.parametrize(("seed", "kind"), [(4188607034, "hard"), (2979176130, "calm"), (2979176362, "hard")])
def test_a_short_cut_of_a_link_does_not_cost_the_only_copy_of_a_rank(seed, kind):
    """The replacement could not reach the copy, and the job stopped. So it did in a repair that had lasted long already."""
    run(seed, kind)


# --- single faults ---------------------------------------------------------------------------------------------------


@contextmanager
def job(machines=3, *, absent=()):
    """Yield a running job. All machines have joined, except the absent ones."""
    with simulated(1, machines, settings(machines), Story) as made:
        for name in made.network.machines:
            if name not in absent:
                made.start(name)
        made.until(lambda: made.leader is not None, 10, "the job is founded")
        made.settle(BOUND_S)
        yield made


def apart(made, some, others):
    """Cut all links between two sets of machines."""
    pairs = [pair for one in some for other in others for pair in ((one, other), (other, one))]
    made.network.cut(pairs)
    return pairs


def open_between(made, *names):
    return [sock for sock in made.network.living() if {sock.machine.name, sock.peer.machine.name} == set(names)]


def test_a_job_starts_trains_and_ends_without_leaving_anything():
    with job() as made:
        made.finish()
        assert [agent.exit_code for agent in made.agents] == [0, 0, 0]
        made.check_nothing_left()


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("machines", [3, 5])
def test_a_node_whose_connection_breaks_as_the_job_ends_learns_its_exit_code(machines, both):
    """The node elected itself, and exited with 1."""
    with job(machines) as made:
        made.steps = max(worker.completed for worker in made.workers.values()) + 3
        made.until(lambda: made.stopped is not None, BOUND_S, "the job ends")
        for sock in open_between(made, "n0", "n1"):
            made.network.reset(sock, both=both)
        made.until(lambda: not made.living(), BOUND_S, "all agents end")
        assert {agent.exit_code for agent in made.agents} == {0}
        made.check_nothing_left()


def test_nodes_learn_of_an_end_only_if_every_later_leader_knows_it():
    """The leader sent its exit code to a node on its side of a cut. The others elected another leader, and continued."""
    with job(4) as made:
        made.only_calm = False
        made.steps = max(worker.completed for worker in made.workers.values()) + 3
        made.until(lambda: made.stopped is not None, BOUND_S, "the leader decides that the job has ended")
        voters = made.leader[0].election.configuration.voters
        others = [name for name in made.network.machines if name not in voters]
        leader = made.leader[0].machine.name
        cut = apart(made, (leader, *others), tuple(voter for voter in voters if voter != leader))
        made.sleep(6 * T)
        made.network.heal(cut)
        made.until(lambda: not made.living(), 36 * T, "all agents end")


def test_an_end_does_not_wait_for_a_node_that_fails_with_it():
    with job() as made:
        made.steps = max(worker.completed for worker in made.workers.values()) + 3
        made.until(lambda: made.stopped is not None, BOUND_S, "the job ends")
        made.kill("n1", power=True)
        made.until(lambda: not made.living(), 1.5 * T, "all agents end")
        assert {agent.exit_code for agent in made.agents if agent.machine.name != "n1"} == {0}


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_agent_is_replaced_and_comes_back_as_a_spare(rank, power):
    """The agent of rank 0 is the leader."""
    with job() as made:
        made.only_calm = False
        whom = made.homes[rank]
        made.kill(whom, power=power)
        made.settle(BOUND_S)
        (incident,) = made.state.incidents
        assert len(incident.losses) == 1
        assert incident.steps_repeated <= 1
        made.start(whom)
        made.settle(BOUND_S)
        assert f"{whom}~2" in made.state.nodes
        made.finish()
        made.check_nothing_left()


@pytest.mark.parametrize("late_s", [0.0, 0.03])
def test_reports_of_a_node_between_two_rejoins_of_a_term_reach_the_leader(late_s, monkeypatch):
    """The node sent only its inventory again, and the leader ignored it because it already had one."""
    honest, broken = Connections._take_in, []

    def take_in(connections, connection, join):
        honest(connections, connection, join)
        if isinstance(join, peers.Rejoin) and join.node in made.homes.values() and not broken:
            broken.append(join.node)
            made.network.reset(connection._sock, both=True)

    monkeypatch.setattr(Connections, "_take_in", take_in)
    with job(5) as made:
        made.only_calm = False
        made.kill("n0")
        made.until(lambda: broken, BOUND_S, "a node with a rank rejoins")
        made.sleep(late_s)
        worker = next(each for each in made.on(broken[0]) if each.alive and each.number in made.ranks)
        worker.die(signal=9)
        made.settle(BOUND_S)


def test_a_node_does_not_wait_on_a_connection_that_is_broken_at_the_leaders_end(monkeypatch):
    """It rejoined, and the leader's end broke without a sign to the node. The node was given up after a node timeout."""
    honest, broken = Connections._take_in, []

    def take_in(connections, connection, join):
        if isinstance(join, peers.Rejoin) and join.node in made.homes.values() and not broken:
            broken.append(join.node)
            made.network.reset(connection._sock, both=False)
        honest(connections, connection, join)

    monkeypatch.setattr(Connections, "_take_in", take_in)
    with job(5) as made:
        made.only_calm = False
        made.kill("n0")
        made.until(lambda: broken, BOUND_S, "a node with a rank rejoins")
        made.settle(BOUND_S)
        assert broken[0] in made.state.nodes
        (incident,) = made.state.incidents
        assert len(incident.losses) == 1


@pytest.mark.parametrize("steps", [6, 12])
def test_a_new_leader_dials_again_if_a_connection_is_broken_at_the_nodes_end(steps):
    """It waited a node timeout for the end of the greeting, sent the node nothing, and gave it up."""
    with job(9) as made:
        made.only_calm = False
        made.kill("n0")
        made.until(lambda: made.leader[0].name != "n0", BOUND_S, "another leader is elected")
        leader = made.leader[0]
        told = next(node for node in made.homes.values() if node not in {"n0", *leader.election.configuration.voters})
        made.until(lambda: open_between(made, leader.name, told), BOUND_S, "the leader dials a node that has no vote")
        for _ in range(steps):
            made.advance()
        for sock in open_between(made, leader.name, told):
            made.network.reset(sock if sock.machine.name == told else sock.peer, both=False)
        made.settle(BOUND_S)
        (incident,) = made.state.incidents
        assert len(incident.losses) == 1


def test_a_node_dials_less_often_if_the_leaders_messages_break_the_connection(monkeypatch):
    """Each waiting message cost a connection, one every 20 ms, and no message gave the reason."""
    with job() as made:
        follower = made.agent_on("n1").member._replica

        def follow(replica, entry, honest=LogFollower.follow):
            if replica is follower:
                raise ProtocolError("it is of another version")
            honest(replica, entry)

        monkeypatch.setattr(LogFollower, "follow", follow)
        leader = made.leader[0].member.leader
        for _ in range(300):
            made.agent_on("n0").loop.inside(leader.submit, ev.TimeAdvanced())
        resumed, honest = [], Connections._resume
        monkeypatch.setattr(Connections, "_resume", lambda *words: (resumed.append(words), honest(*words)))
        made.sleep(0.8 * T)
        assert len(resumed) < 20
        assert sum("it is of another version" in line for line in made.log) == 1


def test_probes_of_a_connection_that_keeps_breaking_leave_none_open():
    with job() as made:
        for _ in range(8):
            made.network.reset(open_between(made, "n0", "n1")[-1], both=True)
            made.settle(BOUND_S)
        made.check_cost()
        assert len(open_between(made, "n0", "n1")) <= 3, "one for orders, and one each way for votes"


def test_a_node_that_joins_a_later_leader_has_its_folder_in_the_runs_folder():
    with job(4, absent=["n3"]) as made:
        made.only_calm = False
        made.kill("n0")
        made.until(lambda: made.leader[0].name != "n0", BOUND_S, "another one leads")
        made.start("n3")
        made.settle(BOUND_S)
        leader, joined = made.leader[0].member, made.agent_on("n3").member
        assert joined._spec.run_dir.name == "node-n3"
        assert joined._spec.run_dir.parent.name == leader._spec.base_dir.name == "run"


@contextmanager
def asked_without_authority():
    """Yield a job and a cut. The leader n0 is cut off from the voters n1 and n2 when n3 asks to join."""
    with job(4, absent=["n3"]) as made:
        made.only_calm = False
        cut = apart(made, ("n0", "n3"), ("n1", "n2"))
        made.until(lambda: not made.agent_on("n0").holds_lease(), BOUND_S, "the leader lacks a lease")
        made.start("n3")
        made.until(lambda: open_between(made, "n0", "n3") != [], BOUND_S, "n3 asks the leader")
        yield made, cut


def test_a_leader_without_authority_admits_no_node():
    """Its successor would not know the node, and would use the node's id again."""
    with asked_without_authority() as (made, cut):
        made.sleep(0.5 * T)
        assert made.agent_on("n3").node is None
        made.network.heal(cut)
        made.settle(BOUND_S)


def test_a_node_gives_up_a_leader_that_fails_before_it_answers():
    with asked_without_authority() as (made, cut):
        made.sleep(0.5)
        made.kill("n0", power=True)
        made.network.heal(cut)
        made.settle(BOUND_S)
        assert made.agent_on("n3").node == "n3"


def test_reports_of_a_node_about_a_rank_that_has_left_do_not_count():
    """They can arrive after the report of the rank's new node, which reports only changes: nothing was committed again."""
    with job() as made:
        leader = made.leader[0].member.leader
        other = next(agent for agent in made.living() if agent.member.leader is None and agent.node != made.homes[0])
        node = other.member.node
        other.loop.inside(node.above.report, peers.Safe(node.timeline, 0, (), transcript=False, buddies=node._buddies))
        made.sleep(0.02)
        assert leader._tracking.commits._safe[0].versions


@pytest.mark.parametrize("later", [1, 3])
def test_a_late_fetch_of_a_node_that_was_given_up_does_not_affect_other_nodes(later):
    """The node paused before the fetch. Meanwhile, the source follows the rank's new owner, which may have newer versions.

    If the source still had the version, the fetch replaced the new owner's snapshots.
    """
    with job(4) as made:
        made.only_calm = False
        lost = made.homes[2]
        made.kill(lost, power=True)
        made.until(lambda: made.homes[2] != lost, BOUND_S, "a spare takes the rank")
        paused = made.homes[2]
        (late,) = made.on(paused)
        made.until(lambda: late.mode is Mode.RESTORING, BOUND_S, "the spare starts to fetch the snapshot")
        wanted = made.state.repair.resume
        made.pause(paused, hears=True)
        made.until(lambda: paused not in made.state.nodes, BOUND_S, "its node is given up")
        made.start(lost)
        made.until(lambda: made.homes[2] != paused, BOUND_S, "another node takes the rank")
        home = made.copies[made.homes[2]]
        made.until(lambda: max(home.held(2), default=-1) == wanted + later, BOUND_S, "the rank continues")
        held = home.held(2)
        made.wake(paused)
        assert late.mode is not Mode.RESTORING
        assert home.held(2) == held
        made.settle(BOUND_S)


def test_a_pause_of_all_machines_costs_nothing():
    with job(5) as made:
        made.pause_all(10 * T)
        made.sleep(11 * T)
        made.settle(BOUND_S)
        made.check_cost()
        assert not made.state.incidents


@pytest.mark.parametrize("whose", ["the leader's", "another"])
def test_a_machine_that_can_start_no_worker_costs_only_itself(whose):
    """Where it led, it ended the job for all."""
    with job(5) as made:
        made.only_calm = False
        leader = made.leader[0]
        agent = leader if whose == "the leader's" else next(each for each in made.living() if each is not leader)
        lost = set(made.state.ranks_on(agent.node))
        agent.loop.call_soon(agent.agent._on_lost, "the process that starts workers ended 3 times before it could")
        made.until(lambda: not agent.lives, BOUND_S, "its agent ends")
        made.settle(BOUND_S)
        assert agent.exit_code == 1
        (incident,) = made.state.incidents
        assert {loss.rank for loss in incident.losses} == lost


def test_workers_are_stopped_in_time_although_their_agents_loop_is_blocked(monkeypatch):
    """Another thread stops them. Else the rank's old owner went on beside the new one."""
    blocked = []
    monkeypatch.setattr(
        VirtualLoop, "runs", property(lambda loop: not loop.ended and loop.machine.runs and loop not in blocked)
    )
    with job(5) as made:
        made.only_calm = False
        leader = made.leader[0]
        agent = next(each for each in made.living() if each is not leader and made.state.ranks_on(each.node))
        lost, leadership = set(made.state.ranks_on(agent.node)), agent.member.leadership

        def look():
            if blocked:
                leadership.suspend_if_due()
                made.clock.after(0.1, look)

        blocked.append(agent.loop)
        look()
        made.until(lambda: not made.state.ranks_on(agent.node), BOUND_S, "the machine is given up")
        blocked.clear()
        made.settle(BOUND_S)
        assert {loss.rank for incident in made.state.incidents for loss in incident.losses} == lost


def test_a_loop_that_was_blocked_for_a_moment_costs_nothing(monkeypatch):
    blocked = []
    monkeypatch.setattr(
        VirtualLoop, "runs", property(lambda loop: not loop.ended and loop.machine.runs and loop not in blocked)
    )
    with job(5) as made:
        leader = made.leader[0]
        agent = next(each for each in made.living() if each is not leader and made.state.ranks_on(each.node))
        blocked.append(agent.loop)
        made.sleep(quorum.suspend_at(agent.election) - agent.loop.time())
        agent.member.leadership.suspend_if_due()
        assert all(worker.suspended for worker in made.on(agent.node) if worker.alive)
        blocked.clear()
        made.settle(BOUND_S)
        assert not any(worker.suspended for worker in made.on(agent.node) if worker.alive)
        assert not made.state.incidents


def test_a_node_that_called_an_agent_which_was_not_elected_is_told_who_leads():
    """It waited for half a node time-out, and the connection stayed open."""
    with job() as made:
        leader = made.leader[0]
        candidate, caller = (each for each in made.living() if each is not leader)
        told, leadership = [], candidate.member.leadership
        as_follower = leadership.agent

        async def call():
            here = made.network.machines[candidate.machine.name].address
            connection = await handshake.connect(here, PORT, ConnectionRole.MEMBER, caller.member._credentials)
            PeerLink(connection, told.append)

        leadership.agent = replace(as_follower, role=ElectionRole.ELECTED)
        calling = caller.loop.create_task(call())
        made.until(lambda: candidate.member._callers, BOUND_S, "the call is accepted")
        leadership.agent = as_follower
        candidate.loop.inside(candidate.member.follow, leadership.leader, as_follower.term)
        made.until(lambda: told, BOUND_S, "the caller hears who leads")
        assert told[0].leader.node == leader.node
        assert calling.done()
        assert not candidate.member._callers
