"""A machine that starts the same line again founds no second job where an earlier one may live."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest
from kit.ends import listening, within_bound
from net.test_nodes import HOLDS, STEP, STEPS
from net.test_rendezvous import LONG, LOOPBACK, TOKEN, Led, cluster, free_port, never

from deadpool_run.agent.records.run_record import RECORD_NAME, RunRecord, make_run_dir
from deadpool_run.agent.rendezvous import earlier_run, leader_file, rendezvous
from deadpool_run.agent.rendezvous.peer_server import PeerServer
from deadpool_run.agent.rendezvous.rendezvous import Found, Founder, find
from deadpool_run.agent.spec import LaunchSpec, Mode, Target
from deadpool_run.coordinator.journal import Journal
from deadpool_run.core import coordinator
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.errors import UsageError
from deadpool_run.wire.auth import Credentials

SETTINGS = Settings(world_size=2, nodes=2)


@pytest.fixture
def spec(tmp_path):
    """A launch of the machine of the only endpoint, which names no run."""
    return launched(tmp_path / "first")


def launched(run_dir, **changed):
    spec = LaunchSpec(
        settings=SETTINGS,
        target=Target(Mode.PATH, ("train.py", "--lr", "3")),
        nproc_per_node=1,
        run_id=run_dir.name,
        run_dir=run_dir,
        cluster=cluster(free_port()),
    )
    return replace(spec, **changed)


def killed(spec, *others):
    """Leave what the leader's agent has written when it is killed: its record without an end, and its journal."""
    make_run_dir(spec.run_dir)
    RunRecord(spec, None)._sink.close(10.0)
    state, journal = coordinator.new_state(SETTINGS), Journal(spec.run_dir / "journal.jsonl", SETTINGS)
    for number, port in enumerate(others):
        journal.append(1.0, ev.NodeJoined(f"n{number}", ev.Place(f"n{number}", LOOPBACK, port)), (), state)
    journal.close()


def again(spec, name="second", **changed):
    """The same line: a launch that has another directory, unless the run has a name."""
    return replace(spec, run_dir=spec.run_dir.with_name(name), run_id=name, **changed)


async def search(spec):
    return await find(spec.cluster, never(), settings=LONG, earlier=earlier_run.find(spec))


@pytest.mark.parametrize("named", [False, True])
def test_it_joins_the_living_job_through_any_agent_of_it(spec, named):
    async def main():
        living = await find(cluster(free_port()), never(), settings=LONG)
        with closing(Led(living, spec.run_id)) as led:
            killed(spec, free_port(), led.server.port)
            found = await search(replace(spec, named=True) if named else again(spec))
            assert isinstance(found, Found)
            with found.connection, found.listener:
                assert found.connection.sock.getpeername() == (LOOPBACK, led.server.port)

    within_bound(main())


def test_it_joins_through_the_leader_file(spec):
    async def main():
        living = await find(cluster(free_port()), never(), settings=LONG)
        with closing(Led(living, spec.run_id)) as led:
            killed(spec)
            pointer = leader_file.LeaderFile(1, "n", "host", LOOPBACK, led.server.port, "/elsewhere")
            leader_file.write(spec.run_dir, pointer)
            found = await search(again(spec))
            assert isinstance(found, Found)
            found.connection.close()
            found.listener.close()

    within_bound(main())


def test_it_founds_no_second_job_while_an_agent_is_silent_and_says_how_to_go_on(spec, monkeypatch):
    monkeypatch.setattr(rendezvous, "_DOUBT_S", 1.0)
    monkeypatch.setattr(rendezvous, "_PROBE_S", 0.2)

    async def main():
        with closing(listening()) as silent:
            silent.listen()
            killed(spec, free_port(), port := silent.getsockname()[1])
            with pytest.raises(UsageError) as refused:
                await search(again(spec))
            for part in ("run first", f"{LOOPBACK}:{port}", "--rdzv-endpoint", f"rm -r {spec.run_dir}"):
                assert part in str(refused.value)
        founder = await search(again(spec))
        assert isinstance(founder, Founder), "its machine refuses now: all agents have ended"
        founder.listener.close()

    within_bound(main())


def test_a_job_whose_agents_were_all_killed_is_started_again_with_the_same_line(spec):
    """As after `kill -9` of all of them, or when all machines have started again."""

    async def main():
        killed(spec, free_port(), free_port())
        founder = await search(again(spec))
        assert isinstance(founder, Founder)
        founder.listener.close()

    within_bound(main())


def ended(spec):
    RunRecord(spec, None).end(0, "done")


def left(spec):
    RunRecord(spec, None).end(0, "drained", over=False)


def ended_elsewhere(spec):
    """It was in the job again, as another node, and saw the end."""
    node = replace(spec, run_dir=spec.run_dir / "node-n~2")
    make_run_dir(node.run_dir)
    RunRecord(node, None, leader=False).end(0, "done")


@pytest.mark.parametrize(("end", "may_live"), [(ended, False), (ended_elsewhere, False), (left, True)])
def test_a_run_that_is_over_is_no_evidence(spec, end, may_live):
    killed(spec)
    end(spec)
    assert (earlier_run.find(again(spec)) is not None) == may_live


@pytest.mark.parametrize(
    "other",
    [
        {"target": Target(Mode.PATH, ("train.py", "--lr", "4"))},
        {"cluster": cluster(1)},
        {"named": True},
    ],
    ids=["arguments", "endpoint", "name"],
)
def test_another_job_is_no_evidence(spec, other):
    killed(spec)
    assert earlier_run.find(again(spec, **other)) is None
    assert earlier_run.find(again(spec)).run_dir == spec.run_dir


def test_a_job_on_one_machine_is_no_evidence(spec):
    killed(replace(spec, cluster=None))
    assert earlier_run.find(again(spec)) is None


def test_a_damaged_record_is_no_evidence(spec):
    killed(spec)
    (spec.run_dir / RECORD_NAME).write_text("{")
    assert earlier_run.find(again(spec)) is None


def test_the_refusal_of_a_directory_does_not_advise_a_second_job(spec):
    killed(spec)
    with pytest.raises(UsageError, match="it may still run: to take part in it") as refused:
        make_run_dir(spec.run_dir)
    assert "--run-id" not in str(refused.value)
    ended(spec)
    with pytest.raises(UsageError, match="another --run-id"):
        make_run_dir(spec.run_dir)


def test_a_busy_agent_is_asked_again(spec):
    """It accepts the connection, and greets only when it has time again."""

    async def main():
        with closing(listening()) as busy:
            busy.listen()
            killed(spec, free_port(), busy.getsockname()[1])
            searching = asyncio.ensure_future(search(again(spec)))
            accepted, _ = await asyncio.to_thread(busy.accept)
            accepted.close()
            server = PeerServer(
                busy.dup(), Credentials(TOKEN, run_id=spec.run_id), lambda _, connection: came.append(connection)
            )
            came = []
            with closing(server):
                found = await searching
            assert isinstance(found, Found)
            for each in (found.connection, found.listener, *came):
                each.close()

    within_bound(main())


def test_a_machine_that_founds_nothing_joins_through_the_agents_that_it_knew(spec):
    """Also while the machine of the endpoint is down."""

    async def main():
        living = await find(cluster(free_port()), never(), settings=LONG)
        with closing(Led(living, spec.run_id)) as led:
            killed(spec, led.server.port)
            other = again(spec, cluster=replace(spec.cluster, founds=False))
            found = await search(other)
            assert isinstance(found, Found)
            found.connection.close()
            found.listener.close()

    within_bound(main())


@pytest.mark.parametrize("net", [3], indirect=True)
def test_the_host_of_the_only_endpoint_joins_the_job_that_another_leads(fleet, reference):
    """Each host has a disk of its own, and knows that one address only."""
    words = ("--layout", "ddp", "--steps", str(STEPS), *STEP, "--hold-replacements")
    job = fleet(*words, hosts=3, nproc=1, apart=True)
    for rank in range(2):
        job.wait_state(rank, 5)
    job.wait_voters(3)
    ranks = [rank for rank in range(2) if job.host_of(rank) == 0]
    job.power_off(0)
    job.look_until(lambda: any("leads the job now" in job.agents[host].output for host in (1, 2)), "leader")
    job.restart(0)
    job.wait_output(0, "as node h0~2")
    job.release(HOLDS)
    job.check_repaired(reference("ddp", STEPS, 2), ranks, [0, 1, 2])
