"""A job over two hosts, where an external authority decides which of them goes on when they lose each other."""

import pytest
from kit import etcd
from net.test_nodes import HOLDS, STEP, STEPS

RUN = "two"


@pytest.fixture
def server(tmp_path, net):
    """An etcd on a host of its own."""
    if etcd.binary() is None:
        pytest.skip("needs etcd on PATH or in DEADPOOL_TEST_ETCD")
    made = etcd.Etcd(tmp_path, address=net.addresses[3], namespace=net.names[3])
    yield made
    made.kill()


def place_of(server, net):
    return f"etcd://{net.addresses[3]}:{server.port}"


@pytest.fixture(params=["file", pytest.param("etcd", marks=pytest.mark.slow)])
def place(request, tmp_path, net):
    """An authority that both hosts reach, whatever lies between them: its place, as `--authority` names it."""
    if request.param == "etcd":
        return place_of(request.getfixturevalue("server"), net)
    (tmp_path / "authority").mkdir()
    return f"file:{tmp_path / 'authority'}"


def begun(fleet, place, hold_replacements=False, **options):
    """Start a job of two ranks, and wait until it is well on its way and both hosts vote."""
    words = ("--layout", "ddp", "--steps", str(STEPS), *STEP, *(("--hold-replacements",) if hold_replacements else ()))
    more = ("--authority", place, "--run-id", RUN, *options.pop("options", ()))
    job = fleet(*words, hosts=2, options=more, **options)
    for rank in range(2):
        job.wait_state(rank, 5)
    job.wait_voters(2)
    return job, [rank for rank in range(2) if job.host_of(rank) == 0]


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_host_that_loses_its_power(fleet, reference, place, lost):
    job, ranks = begun(fleet, place)
    job.power_off(lost)
    job.check_repaired(reference("ddp", STEPS, 2), ranks if lost == 0 else [], [1 - lost])


def test_hosts_whose_link_is_cut(fleet, net, reference, place):
    """One goes on, and the other ends its workers: the leader, since it has nothing to take over."""
    job, _ = begun(fleet, place)
    net.separate(0, 1)
    job.check_repaired(reference("ddp", STEPS, 2), [], [0])
    assert "repairing" not in job.agents[0].output
    job.wait_output(1, "the authority has given term 1 to another node")
    assert job.wait_exit([1]) == [0], "the authority says how the run ended"


@pytest.mark.slow
def test_a_host_is_lost_while_etcd_is_down(fleet, net, reference, server):
    """The other host waits for it to decide, and then goes on."""
    job, ranks = begun(fleet, place_of(server, net))
    server.kill()
    job.power_off(0)
    job.wait_output(1, "until the authority answers, ")
    server.start()
    job.check_repaired(reference("ddp", STEPS, 2), ranks, [1])


@pytest.mark.slow
def test_the_link_between_hosts_is_cut_while_etcd_is_down(fleet, net, reference, server):
    """Neither goes on before it is back. Then exactly one does, and the other learns how the run ended."""
    job, ranks = begun(fleet, place_of(server, net), hold_replacements=True)
    server.kill()
    net.separate(0, 1)
    job.wait_output(1, "until the authority answers, ")
    server.start()
    job.release(HOLDS)
    job.look_until(
        lambda: any("given term" in job.agents[host].output for host in range(2)), "a host that the authority refuses"
    )
    (refused,) = [host for host in range(2) if "given term" in job.agents[host].output]
    job.check_repaired(reference("ddp", STEPS, 2), ranks if refused == 0 else [], [1 - refused])


@pytest.mark.slow
def test_a_host_that_pauses(fleet, reference, place):
    """The other takes its ranks; when it wakes, it ends its workers and joins again as a spare."""
    job, ranks = begun(fleet, place, hold_replacements=True)
    job.pause([0], 2.0)
    job.wait_output(0, "this node ends its workers")
    job.wait_output(0, "as node h0~2")
    job.release(HOLDS)
    job.check_repaired(reference("ddp", STEPS, 2), ranks, [0, 1])


@pytest.mark.slow
def test_hosts_that_both_pause_go_on(fleet, reference, place):
    job, _ = begun(fleet, place)
    job.pause([0, 1], 3.0)
    job.check_repaired(reference("ddp", STEPS, 2), [], [0, 1])


def test_the_first_host_started_again_joins_the_job_that_another_leads(fleet, reference, place):
    """Though its own address is the only one that it was given: alone, it would start a second job."""
    job, ranks = begun(fleet, place, apart=True, hold_replacements=True)
    job.power_off(0)
    job.wait_output(1, "this node leads the job now")
    job.restart(0)
    job.wait_output(0, f"joined run {RUN} as node h0~2")
    job.release(HOLDS)
    job.check_repaired(reference("ddp", STEPS, 2), ranks, [0, 1])


@pytest.mark.slow
def test_a_run_that_is_over_is_not_started_again(fleet, tmp_path):
    (tmp_path / "authority").mkdir()
    options = ("--authority", f"file:{tmp_path / 'authority'}", "--run-id", RUN)
    job = fleet("--steps", "2", hosts=2, options=options)
    assert job.wait_exit([0, 1]) == [0, 0]
    job.restart(0)
    assert job.wait_exit([0]) == [0]
    assert "this run is over: every rank finished" in job.agents[0].output
