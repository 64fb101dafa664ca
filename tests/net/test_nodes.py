"""A job over four hosts, one of them in reserve, loses one, in every way in which hosts are lost."""

import re
import signal

import pytest
from kit.choice import often

STEPS = 30
STEP = ("--least-ms", "100")
"""Copies go out beside the next step, and training does not wait for them: a shorter one could be lost with the one before."""


HOLDS = 64
"""More than there are processes in a job."""


def begun(fleet, layout="ddp", *, version=5, hold_replacements=False, **options):
    """Start a job and wait until every rank is well on its way; return it, and which ranks each host holds."""
    words = ("--hold-replacements",) if hold_replacements else ()
    job = fleet("--layout", layout, "--steps", str(STEPS), *STEP, *words, **options)
    ranks = 2 * (4 - int(options.get("spares", "1")))
    for rank in range(ranks):
        job.wait_state(rank, version)
    homes = {rank: job.host_of(rank) for rank in range(ranks)}
    return job, {host: [rank for rank in homes if homes[rank] == host] for host in range(4)}


def others(*hosts):
    return [host for host in range(4) if host not in hosts]


@pytest.mark.slow
def test_an_unfailed_job_over_several_hosts_is_that_of_one(fleet, reference):
    job = fleet("--layout", "ddp", "--steps", "12")
    job.check_repaired(reference("ddp", 12), [], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("whose", "layout"),
    [
        ("the coordinator's", "fsdp"),
        pytest.param("the coordinator's", "ddp", marks=pytest.mark.slow),
        pytest.param("another", "fsdp", marks=pytest.mark.slow),
        pytest.param("another", "ddp", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_loses_its_power(fleet, reference, whose, layout):
    job, ranks = begun(fleet, layout)
    lost = 0 if whose == "the coordinator's" else next(host for host in (2, 1, 3) if ranks[host])
    job.power_off(lost)
    job.check_repaired(reference(layout, STEPS), ranks[lost], others(lost))
    told = "".join(job.agents[host].output for host in others(lost))
    assert {*re.findall(r"node (\S+) is lost: ", told)} == {f"h{lost}"}, "the others, voters or not, follow the leader"


@pytest.mark.parametrize("whose", often(["the coordinator's", "another"], {"the coordinator's"}))
def test_an_agent_that_is_killed_alone_is_found_by_its_machines_word(fleet, reference, whose):
    """Its fork server has ended the workers, and says so: nobody waits for the time-out."""
    job, ranks = begun(fleet, node_timeout_s=15.0)
    job.wait_voters(3)
    lost = 0 if whose == "the coordinator's" else next(host for host in (2, 1, 3) if ranks[host])
    job.agents[lost].process.kill()
    job.check_repaired(reference("ddp", STEPS), ranks[lost], others(lost))
    outputs = "".join(job.agents[host].output for host in others(lost))
    assert f"node h{lost} is lost: its agent ended" in outputs


BUG = """
import sys
import time

if "deadpool_run" in sys.orig_argv:
    from deadpool_run.agent.rendezvous import leader_file
    from deadpool_run.core.recovery import repair

    write = leader_file.write

    def written_late(*args):
        time.sleep(1.0)
        write(*args)

    leader_file.write = written_late

    def lost(*_):
        raise AssertionError("a bug in the leader's decisions")

    repair.lost = lost
"""


def test_a_leader_that_fails_by_a_bug_costs_its_host_and_not_the_job(fleet, reference):
    """Rank 2 dies on another host, and the leader's coordinator fails at that.

    The founder holds rank 0, though its disk is slow and the others joined meanwhile.
    """
    words = ("--layout", "ddp", "--steps", str(STEPS), *STEP, "--die", "rank=2,step=8,at=forward")
    job = fleet(*words, plant=BUG)
    job.wait_state(0, 5)
    assert [job.host_of(rank) == 0 for rank in range(3)] == [True, True, False]
    job.check_repaired(reference("ddp", STEPS), [0, 1, 2], others(0))
    assert any("node h0 is lost: its agent ended" in job.agents[host].output for host in others(0))
    assert "AssertionError: a bug in the leader's decisions" in job.agents[0].output


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hsdp", "tp", "pp"])
def test_a_host_of_two_in_layouts_of_four_ranks(fleet, reference, layout):
    job, ranks = begun(fleet, layout, spares="2")
    lost = next(host for host in (2, 1, 3) if ranks[host])
    job.power_off(lost)
    job.check_repaired(reference(layout, STEPS, 4), ranks[lost], others(lost))


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["the coordinator's", "another"])
def test_a_host_whose_link_goes_down(fleet, net, reference, whose):
    job, ranks = begun(fleet)
    lost = 0 if whose == "the coordinator's" else next(host for host in (2, 1, 3) if ranks[host])
    net.cut(lost)
    job.check_repaired(reference("ddp", STEPS), ranks[lost], others(lost))
    job.wait_output(lost, "this node ends its workers")


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["the coordinator's", "another"])
def test_a_host_that_freezes_and_thaws_after_it_was_replaced(fleet, reference, whose):
    job, ranks = begun(fleet)
    lost = 0 if whose == "the coordinator's" else next(host for host in (2, 1, 3) if ranks[host])
    job.agents[lost].everything(signal.SIGSTOP)
    for rank in ranks[lost]:
        job.wait_state(rank, 8, pid_not=job.account.pids(rank)[:1])
    job.agents[lost].everything(signal.SIGCONT)
    job.check_repaired(reference("ddp", STEPS), ranks[lost], others(lost))
    job.wait_output(lost, "this node ends its workers")


@pytest.mark.slow
def test_a_coordinator_that_pauses_for_longer_than_it_may_decide_takes_nobody_with_it(fleet, reference):
    """Another is elected. It finds that one, and all the others, though the only endpoint was its own."""
    job, ranks = begun(fleet, apart=True, hold_replacements=True)
    job.pause([0], 1.5)
    job.wait_output(0, "this node ends its workers")
    job.wait_output(0, "as node h0~2")
    job.release(HOLDS)
    job.check_repaired(reference("ddp", STEPS), ranks[0], [0, 1, 2, 3])


def test_hosts_that_all_pause_go_on(fleet, reference):
    """As when a job is suspended, or the disk of all virtual machines stalls. Nobody is replaced."""
    job, _ = begun(fleet)
    job.pause([0, 1, 2, 3], 3.0)
    job.check_repaired(reference("ddp", STEPS), [], [0, 1, 2, 3])
    assert all("this node ends its workers" not in agent.output for agent in job.agents)


@pytest.mark.parametrize("whose", often(["the coordinator's", "another"], {"the coordinator's"}))
def test_a_connection_between_agents_that_is_reset_costs_nothing(fleet, reference, whose):
    """A firewall or a sidecar does that. The node connects again, and no message is lost."""
    job, ranks = begun(fleet)
    other = next(host for host in (2, 1, 3) if ranks[host])
    job.reset_connections(0 if whose == "the coordinator's" else other)
    job.check_repaired(reference("ddp", STEPS), [], [0, 1, 2, 3])


@pytest.mark.slow
def test_a_partition_of_three_and_one(fleet, net, reference):
    job, ranks = begun(fleet)
    lost = next(host for host in (2, 1, 3) if ranks[host])
    net.part([lost])
    job.check_repaired(reference("ddp", STEPS), ranks[lost], others(lost))


@pytest.mark.slow
def test_of_two_and_two_the_side_with_two_voters_decides_and_the_other_stops(fleet, net):
    """Three hosts are needed, so that the job ends there too; and both say why."""
    job, _ = begun(fleet, options=("--join-timeout", "5"))
    first, second = [host for host in job.wait_voters(3) if host != 0]
    away = next(host for host in (1, 2, 3) if host not in (first, second))
    net.part([second, away])
    assert job.wait_exit([0, 1, 2, 3]) == [1, 1, 1, 1]
    assert all("no place is left for rank" in job.agents[host].output for host in (0, first))
    assert all("no leader was heard of for 12 s" in job.agents[host].output for host in (second, away))


@pytest.mark.slow
@pytest.mark.parametrize("second", ["the replacements'", "the coordinator's"])
def test_a_host_that_is_lost_while_the_loss_of_another_is_repaired(fleet, reference, second):
    """Two of four hosts hold the ranks, and each snapshot lies on two others.

    Replacements that would set up beside the store of a coordinator that is gone are replaced like those that are lost. Nobody
    is waited for as long as a member may take: that would outlast this test.
    """
    options = ("--replicas", "2", "--repair-timeout", "1000")
    job, ranks = begun(fleet, spares="2", options=options, hold_replacements=second == "the coordinator's")
    first = next(host for host in (3, 2, 1) if ranks[host])
    job.power_off(first)
    for rank in ranks[first]:
        job.wait_until(lambda rank=rank: len(job.account.pids(rank)) > 1, f"a replacement for rank {rank}")
    other = job.host_of(ranks[first][0]) if second == "the replacements'" else 0
    job.power_off(other)
    job.release(HOLDS)
    job.check_repaired(reference("ddp", STEPS, 4), [*ranks[first] * 2, *ranks[other]], others(first, other))
    job.account.check_one_at_a_time()


def last_buddies(job):
    """Return who holds whose copies, once nobody who held them before does any more."""

    def chosen():
        lines = job.journal()
        found = [
            number for number, line in enumerate(lines) for each in line["effects"] if each["type"] == "SetBuddies"
        ]
        later = lines[found[-1] + 1 :] if found else []
        return found and any(line["event"]["type"] == "SnapshotCommitted" for line in later) and lines[found[-1]]

    job.look_until(chosen, "copies where they belong")
    return next(effect["buddies"] for effect in chosen()["effects"] if effect["type"] == "SetBuddies")


@pytest.mark.slow
def test_a_job_that_lost_every_holder_of_a_rank_stops_and_names_it(fleet):
    job, ranks = begun(fleet, spares="1", options=("--join-timeout", "5"), hold_replacements=True)
    told = last_buddies(job)
    rank = next(rank for host in (1, 2, 3) for rank in ranks[host] if told[rank] != ["h0"])
    home, buddy = job.host_of(rank), int(told[rank][0][1])
    job.power_off(home)
    job.wait_voters(
        3, home
    )  # of four hosts two are no majority, so that the others take over the lost one's vote first
    job.power_off(buddy)
    rest = others(home, buddy)
    assert job.wait_exit(rest) == [1, 1]
    assert any(f"every holder of rank {rank}" in job.agents[host].output for host in rest), job.told()
