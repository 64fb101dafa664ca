"""Real agents in virtual time: swarms of stories, and what single faults lead to.

`SHELLS_SEED=n` runs the story of that seed in place of those of new seeds.
"""

import os
import secrets
import subprocess
import sys
from contextlib import contextmanager

import pytest
import search_shells
from stories import BOUND_S, KINDS, Story, T, settings, tell
from surroundings import simulated
from workers import Mode

from deadpool_run.coordinator.connections import Connections
from deadpool_run.coordinator.log_follower import LogFollower
from deadpool_run.core import events as ev
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import peers

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
def test_the_same_seed_is_the_same_story(kind):
    assert tell(3, kind) == tell(3, kind)


def test_the_search_runs_as_make_starts_it():
    """Without what pytest adds to the path of modules."""
    command = [sys.executable, search_shells.__file__, "--seed", "3", "--kind", KINDS[0]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("1 stories of agents, 0 failures\n")


@pytest.mark.parametrize("seed", [67, 76])
def test_a_node_whose_connection_breaks_as_it_rejoins_gets_its_orders(seed):
    """They were lost with that connection, and the repair waited for the node in vain."""
    run(seed, "hard")


def test_a_node_that_wakes_up_stops_its_workers_before_it_obeys_an_old_order():
    """The order had waited in its socket, and the rank was given to another meanwhile."""
    run(160708319, "wild")


def test_a_leader_that_had_no_authority_loses_no_node_that_told_it_meanwhile():
    """Its clock had come to the end of the takeover, and the node's inventory waited behind that."""
    run(308484255, "wild")


def test_a_pause_of_all_machines_costs_no_leader_that_was_out_of_reach_for_a_moment_before():
    """Its voters did not notice a pause that ended a little after their next deadline, and elected another one."""
    run(1670546040, "calm")


@pytest.mark.parametrize(("seed", "kind"), [(4188607034, "hard"), (2979176130, "calm"), (2979176362, "hard")])
def test_a_link_that_is_cut_for_a_moment_does_not_cost_the_only_copy_of_a_rank(seed, kind):
    """The replacement could not reach the copy, and the job stopped; also in a repair that had lasted long before."""
    run(seed, kind)


# --- single faults ---------------------------------------------------------------------------------------------------


@contextmanager
def job(machines=3, *, absent=()):
    """A job at work, on machines that have all joined, but those that are absent."""
    with simulated(1, machines, settings(machines), Story) as made:
        for name in made.network.machines:
            if name not in absent:
                made.start(name)
        made.until(lambda: made.leader is not None, 10, "the job is founded")
        made.settle(BOUND_S)
        yield made


def apart(made, some, others):
    """Cut these from those."""
    pairs = [pair for one in some for other in others for pair in ((one, other), (other, one))]
    made.network.cut(pairs)
    return pairs


def open_between(made, *names):
    return [sock for sock in made.network.living() if {sock.machine.name, sock.peer.machine.name} == set(names)]


def test_agents_found_a_job_train_end_well_and_leave_nothing():
    with job() as made:
        made.finish()
        assert [agent.exit_code for agent in made.agents] == [0, 0, 0]
        made.check_nothing_left()


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("machines", [3, 5])
def test_a_node_whose_connection_breaks_as_the_job_ends_learns_how_it_ended(machines, both):
    """It elected itself, and exited with 1."""
    with job(machines) as made:
        made.steps = max(worker.completed for worker in made.workers.values()) + 3
        made.until(lambda: made.stopped is not None, BOUND_S, "the job ends")
        for sock in open_between(made, "n0", "n1"):
            made.network.reset(sock, both=both)
        made.until(lambda: not made.living(), BOUND_S, "all agents end")
        assert {agent.exit_code for agent in made.agents} == {0}
        made.check_nothing_left()


def test_nobody_learns_of_an_end_that_a_later_leader_may_not_know():
    """The leader told its exit code to a node on its side of the cut, and the others chose another one, which went on."""
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
    """That of rank 0 leads."""
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
def test_what_a_node_reports_between_two_rejoins_of_a_term_reaches_the_leader(late_s, monkeypatch):
    """The leader had its inventory, so that the next one did not count, and nothing but that was sent again."""
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


def test_a_node_does_not_wait_for_an_answer_on_a_connection_of_which_the_leader_knows_no_more(monkeypatch):
    """It rejoined, the leader's end broke, and it heard nothing of that: it was given up after a node timeout."""
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
def test_a_new_leader_dials_a_node_again_that_knows_no_more_of_the_connection(steps):
    """It waited for the end of the greeting for a node timeout, told the node nothing, and gave it up."""
    with job(9) as made:
        made.only_calm = False
        made.kill("n0")
        made.until(lambda: made.leader[0].name != "n0", BOUND_S, "another one leads")
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


def test_a_node_dials_a_leader_ever_more_rarely_whose_messages_break_the_connection(monkeypatch):
    """Each message that waited cost a connection, one every 20 ms; and nobody said why."""
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


def test_probes_of_a_connection_that_breaks_again_and_again_leave_none_open():
    with job() as made:
        for _ in range(8):
            made.network.reset(open_between(made, "n0", "n1")[-1], both=True)
            made.settle(BOUND_S)
        made.check_cost()
        assert len(open_between(made, "n0", "n1")) <= 3, "one for orders, and one each way for votes"


def test_a_node_that_joins_a_later_leader_has_its_folder_in_that_of_the_run():
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
    """A job whose leader n0 is cut off from the voters n1 and n2 when n3 asks it to be admitted; and the cut."""
    with job(4, absent=["n3"]) as made:
        made.only_calm = False
        cut = apart(made, ("n0", "n3"), ("n1", "n2"))
        made.until(lambda: not made.agent_on("n0").has_authority(), BOUND_S, "the leader lacks authority")
        made.start("n3")
        made.until(lambda: open_between(made, "n0", "n3") != [], BOUND_S, "n3 asks the leader")
        yield made, cut


def test_a_leader_without_authority_admits_nobody():
    """Its successor would know neither the node nor its id, and give the id again."""
    with asked_without_authority() as (made, cut):
        made.sleep(0.5 * T)
        assert made.agent_on("n3").node is None
        made.network.heal(cut)
        made.settle(BOUND_S)


def test_a_node_does_not_wait_without_end_for_a_leader_that_fails_before_it_answers():
    with asked_without_authority() as (made, cut):
        made.sleep(0.5)
        made.kill("n0", power=True)
        made.network.heal(cut)
        made.settle(BOUND_S)
        assert made.agent_on("n3").node == "n3"


def test_reports_of_a_node_that_a_rank_has_left_do_not_count():
    """They can come after those of its new home, which has nothing new to report then: nothing was committed any more."""
    with job() as made:
        leader = made.leader[0].member.leader
        other = next(agent for agent in made.living() if agent.member.leader is None and agent.node != made.homes[0])
        node = other.member.node
        other.loop.inside(node.above.report, peers.Safe(node.timeline, 0, (), transcript=False))
        made.sleep(0.02)
        assert leader._tracking.commits._safe[0].versions


@pytest.mark.parametrize("later", [1, 3])
def test_a_fetch_of_a_node_that_was_given_up_meanwhile_concerns_nobody_else(later):
    """The node paused before it. The source keeps what the rank's present owner holds, which may be newer by then.

    As long as the source had that version, it replaced what the present owner held.
    """
    with job(4) as made:
        made.only_calm = False
        lost = made.homes[2]
        made.kill(lost, power=True)
        made.until(lambda: made.homes[2] != lost, BOUND_S, "a spare takes the rank")
        paused = made.homes[2]
        (late,) = made.on(paused)
        made.until(lambda: late.mode is Mode.RESTORING, BOUND_S, "the spare is to fetch the snapshot")
        wanted = made.state.repair.resume
        made.pause(paused, hears=True)
        made.until(lambda: paused not in made.state.nodes, BOUND_S, "its node is given up")
        made.start(lost)
        made.until(lambda: made.homes[2] != paused, BOUND_S, "another node takes the rank")
        home = made.copies[made.homes[2]]
        made.until(lambda: max(home.held(2), default=-1) == wanted + later, BOUND_S, "the rank goes on")
        held = home.held(2)
        made.wake(paused)
        assert late.mode is not Mode.RESTORING
        assert home.held(2) == held
        made.settle(BOUND_S)


def test_all_machines_pause_together_and_lose_nothing():
    with job(5) as made:
        made.pause_all(10 * T)
        made.sleep(11 * T)
        made.settle(BOUND_S)
        made.check_cost()
        assert not made.state.incidents
