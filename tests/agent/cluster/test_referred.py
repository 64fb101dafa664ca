"""A machine that is referred to a leader which it cannot reach."""

import asyncio

from kit.ends import within_bound

from deadpool_run.agent.agent import _Agent
from deadpool_run.agent.cluster.follower import RedirectError
from deadpool_run.agent.rendezvous import rendezvous
from deadpool_run.agent.spec import Cluster, LaunchSpec, Mode, Target
from deadpool_run.core.settings import Settings
from deadpool_run.wire.peers import Peer

LEADER = Peer("b", "10.0.0.2", 29400)


class Referred(_Agent):
    """Every agent that it finds names that leader."""

    def __init__(self, spec):
        self._spec, self.base, self._former = spec, None, None
        self._over = asyncio.get_running_loop().create_future()
        self.found_nobody = False

    async def _be_member(self, *_):
        raise RedirectError(LEADER)


def test_it_gives_up_in_time_and_says_why(tmp_path, monkeypatch, capfd):
    async def find(*_, **__):
        return object()

    async def redirect(*_):
        return None

    monkeypatch.setattr(rendezvous, "find", find)
    monkeypatch.setattr(rendezvous, "redirect", redirect)
    cluster = Cluster(endpoints=(("10.0.0.1", 29400),), token=b"of the job", node_name="a")
    target = Target(Mode.PATH, ("train.py",))
    settings = Settings(world_size=2, nodes=2, join_timeout_s=0.3)
    spec = LaunchSpec(settings=settings, target=target, nproc_per_node=1, run_id="r", run_dir=tmp_path, cluster=cluster)

    async def main():
        agent = Referred(spec)
        assert await agent._among_others(cluster) != 0
        assert agent.found_nobody

    within_bound(main())
    assert (
        "no leader admitted this node within 0.3 s (the leader at 10.0.0.2:29400 does not answer)"
        in capfd.readouterr().err
    )
