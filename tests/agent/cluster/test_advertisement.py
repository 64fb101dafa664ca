"""The records that a leader publishes, and its claims at the authority."""

import asyncio
from types import SimpleNamespace

from deadpool_run.agent.cluster import advertisement
from deadpool_run.agent.cluster.advertisement import Advertisement
from deadpool_run.agent.rendezvous import leader_file
from deadpool_run.errors import AuthorityError
from deadpool_run.ids import NodeId
from deadpool_run.wire.peers import Peer

LIMIT_S = 30


class Authority:
    """Gives no answer, and counts how often it is asked for each term."""

    run_id = "run"

    def __init__(self, loop):
        self._loop = loop
        self.asked = asyncio.Queue()

    def claim(self, claim):
        self._loop.call_soon_threadsafe(self.asked.put_nowait, claim.term)
        raise AuthorityError("no answer")


def test_a_leader_that_is_elected_again_no_longer_claims_its_earlier_term(tmp_path, monkeypatch):
    """The authority would refuse that claim, and the agent would take itself for a leader that was replaced."""
    monkeypatch.setattr(advertisement, "_AGAIN_S", 0.0)

    async def run():
        authority = Authority(asyncio.get_running_loop())
        cluster = SimpleNamespace(authority=authority, meeting=None)
        spec = SimpleNamespace(cluster=cluster, base_dir=None, run_dir=tmp_path)
        shown = Advertisement(spec, Peer(NodeId("a"), "127.0.0.1", 1), lambda _why: None)
        shown.lead(None, 1)
        assert await authority.asked.get() == 1
        shown.lead(None, 3)
        async with asyncio.timeout(LIMIT_S):
            while await authority.asked.get() != 3:
                pass  # a claim of term 1 that was under way
        assert {await authority.asked.get() for _ in range(20)} == {3}
        shown.close(0, "done", fenced=True)

    asyncio.run(run())


def test_a_leader_file_that_could_not_be_written_is_written_later(tmp_path, monkeypatch):
    """Viewers on the other machines find the leader by it."""
    monkeypatch.setattr(advertisement, "_AGAIN_S", 0.0)
    base, write = tmp_path / "base", leader_file.write

    async def run():
        loop, told, written = asyncio.get_running_loop(), asyncio.Queue(), asyncio.Event()

        def write_and_report(*given):
            write(*given)
            loop.call_soon_threadsafe(written.set)

        monkeypatch.setattr(leader_file, "write", write_and_report)
        monkeypatch.setattr(advertisement, "tell", lambda line: loop.call_soon_threadsafe(told.put_nowait, line))
        spec = SimpleNamespace(cluster=SimpleNamespace(authority=None, meeting=None), base_dir=base, run_dir=tmp_path)
        shown = Advertisement(spec, Peer(NodeId("a"), "127.0.0.1", 1), lambda _why: None)
        shown.lead(None, 4)
        async with asyncio.timeout(LIMIT_S):
            assert "cannot write the leader file" in await told.get()
            base.mkdir()
            await written.wait()
        shown.close(0, "done", fenced=True)
        assert told.empty()

    asyncio.run(run())
    found = leader_file.read(base)
    assert (found.term, found.node) == (4, "a")
