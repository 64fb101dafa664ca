"""Agents that find their job in a folder on a shared disk; and by what a coordinator that came later says there."""

import asyncio
import socket
from contextlib import closing

import pytest
from kit.ends import within_bound
from net.test_rendezvous import LONG, TOKEN, Led, free_port, never, settings

from deadpool_run.agent.authority.claim import LeaderClaim, RunEnd
from deadpool_run.agent.authority.parse import parse_authority
from deadpool_run.agent.rendezvous import leader_file, rendezvous
from deadpool_run.agent.rendezvous.rendezvous import Former, Found, Founder, Over, find
from deadpool_run.agent.spec import Cluster


def authority(folder):
    return parse_authority(f"file:{folder}", "run")


def cluster(folder):
    return Cluster(endpoints=(), authority=authority(folder), meeting=folder, token=TOKEN, node_name="n")


def look(folder, *, former=None, **waits):
    return find(cluster(folder), never(), former=former, settings=settings(**waits))


def let_go(found):
    found.connection.close()
    found.listener.close()


def test_whoever_comes_first_founds_the_job_and_the_others_find_it_there(tmp_path):
    async def main():
        seeking = [asyncio.ensure_future(look(tmp_path / "m")) for _ in range(4)]
        done, _ = await asyncio.wait(seeking, return_when=asyncio.FIRST_COMPLETED)
        (founder,) = [each.result() for each in done]
        assert isinstance(founder, Founder)
        assert founder.term == 0
        with closing(Led(founder)):
            for each in seeking:
                found = await each
                if found is not founder:
                    assert isinstance(found, Found)
                    let_go(found)

    within_bound(main())


def test_who_took_over_is_found_though_the_first_is_gone(tmp_path):
    async def main():
        first = await look(tmp_path / "m")
        first.listener.close()
        second = Founder("127.0.0.1", socket.create_server(("127.0.0.1", 0)))
        port = second.listener.getsockname()[1]
        assert authority(tmp_path / "m").claim(LeaderClaim(1, "n2", "127.0.0.1", port, "run"))
        with closing(Led(second)) as led:
            let_go(await look(tmp_path / "m", former=Former()))
            await led.until(lambda: led.came)

    within_bound(main())


def test_a_run_that_is_over_is_not_begun_again(tmp_path):
    async def main():
        (await look(tmp_path / "m")).listener.close()
        authority(tmp_path / "m").close_run(RunEnd(3, "rank 1 failed"))
        assert await look(tmp_path / "m") == Over(3, "this run is over: rank 1 failed")

    within_bound(main())


def test_a_run_that_is_to_be_queued_again_is_founded_again(tmp_path):
    async def main():
        (await look(tmp_path / "m")).listener.close()
        assert authority(tmp_path / "m").claim(LeaderClaim(1, "n", "", 0, "run"))
        again = await look(tmp_path / "m")
        again.listener.close()
        assert again.term == 2
        claim = authority(tmp_path / "m").read().claim
        assert (claim.term, claim.node) == (2, "n~r2")

    within_bound(main())


def test_a_job_that_nobody_takes_over_is_founded_again_but_not_by_one_that_was_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "_ABANDONED_S", 0.3)

    async def main():
        (await look(tmp_path / "m", node_timeout_s=0.05)).listener.close()
        gave_up = await look(tmp_path / "m", node_timeout_s=0.05, former=Former(), join_timeout_s=1.0)
        assert gave_up.exit_code == 1
        assert "the run has no leader now" in gave_up.reason
        again = await look(tmp_path / "m", node_timeout_s=0.05)
        again.listener.close()
        assert again.term == 1

    within_bound(main())


def test_the_first_node_of_a_run_that_nobody_took_over_founds_it_again_at_its_own_address(tmp_path, monkeypatch):
    """The recorded leader has this node's own address: dialling it, the node would wait for itself."""
    monkeypatch.setattr(rendezvous, "_ABANDONED_S", 0.3)
    (tmp_path / "m").mkdir()

    async def main():
        where = {"endpoints": (("127.0.0.1", free_port()),), "token": TOKEN, "node_name": "n"}
        for term in range(2):
            place = Cluster(**where, authority=authority(tmp_path / "m"))
            found = await find(place, never(), settings=settings(node_timeout_s=0.05))
            found.listener.close()
            assert (type(found), found.term) == (Founder, term)

    within_bound(main())


def test_of_two_first_nodes_one_founds_the_run(tmp_path):
    """Each was given only its own address as the endpoint, by mistake."""
    (tmp_path / "m").mkdir()

    async def main():
        def place(name):
            where = (("127.0.0.1", free_port()),)
            return Cluster(endpoints=where, authority=authority(tmp_path / "m"), token=TOKEN, node_name=name)

        founder = await find(place("a"), never(), settings=LONG)
        with closing(Led(founder)):
            let_go(await find(place("b"), never(), settings=LONG))

    within_bound(main())


def test_a_leader_is_not_taken_for_abandoned_at_once(tmp_path):
    async def main():
        (await look(tmp_path / "m")).listener.close()
        gave_up = await look(tmp_path / "m", join_timeout_s=0.5)
        assert isinstance(gave_up, Over)
        assert "refused" in gave_up.reason

    within_bound(main())


def test_one_that_was_in_the_job_asks_those_that_it_knew():
    async def main():
        later = Founder("127.0.0.1", socket.create_server(("127.0.0.1", 0)))
        where = Cluster(endpoints=(("127.0.0.1", free_port()),), token=TOKEN, node_name="n")
        known = [("127.0.0.1", free_port()), later.listener.getsockname()]
        with closing(Led(later)):
            let_go(await find(where, never(), settings=LONG, former=Former(agents=known)))
        assert isinstance(await find(where, never(), settings=LONG, former=Former(agents=known)), Over)

    within_bound(main())


@pytest.mark.parametrize("told", [True, False])
def test_one_that_was_in_the_job_asks_who_leads_it_by_what_the_run_directory_says(tmp_path, told):
    async def main():
        later = Founder("127.0.0.1", socket.create_server(("127.0.0.1", 0)))
        port = later.listener.getsockname()[1]
        if told:
            leader_file.write(tmp_path, leader_file.LeaderFile(2, "n3", "here", "127.0.0.1", port, str(tmp_path)))
            old = leader_file.LeaderFile(1, "n2", "here", "127.0.0.1", 1, str(tmp_path))
            leader_file.write(tmp_path, old)  # which comes late, and does not count
        where = Cluster(endpoints=(("127.0.0.1", free_port()),), token=TOKEN, node_name="n")
        with closing(Led(later)):
            found = await find(where, never(), former=Former(), settings=LONG, base=tmp_path)
            if told:
                let_go(found)
            else:
                assert isinstance(found, Over)

    within_bound(main())


def test_what_is_torn_or_foreign_in_the_run_directory_is_nothing(tmp_path):
    for text in ("", "{", "[]", '{"term": 1}', '{"term": "x", "port": 1}'):
        (tmp_path / "leader.json").write_text(text)
        assert leader_file.read(tmp_path) is None


def test_only_the_node_that_the_scheduler_calls_first_founds_the_job():
    async def main():
        port = free_port()
        second = Cluster(endpoints=(("127.0.0.1", port),), token=TOKEN, node_name="n2", founds=False)
        gave_up = await find(second, never(), settings=settings(0.3))
        assert isinstance(gave_up, Over), "though it could have bound the address"

    within_bound(main())


def test_of_several_endpoints_one_that_is_no_name_does_no_harm():
    async def main():
        where = Cluster(endpoints=(("a..b", 1), ("127.0.0.1", free_port())), token=TOKEN, node_name="n")
        gave_up = await find(where, never(), settings=settings(0.3))
        assert isinstance(gave_up, Over)

    within_bound(main())
