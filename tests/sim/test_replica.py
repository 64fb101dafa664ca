"""A log follower that follows a coordinator knows what it knows, wherever in a job it begins to."""

import asyncio
import json
import random

import pytest
from msgspec import structs
from simulations import nodes_simulation

from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.log_follower import FollowedLog, LogFollower
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core import coordinator
from deadpool_run.core.events import TimeAdvanced
from deadpool_run.core.leadership.electorate import LogIndex
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import peers, typed


def over_the_wire(message):
    return peers.decode(peers.encode(message)[4:])


@pytest.mark.parametrize("seed", range(12))
def test_a_log_follower_knows_what_the_coordinator_knows(seed, monkeypatch):
    told = []
    step = coordinator.step

    def noting(settings, state, event, now):
        told.append((typed.to_plain(state), event, now))
        return step(settings, state, event, now)

    job = nodes_simulation(seed)
    monkeypatch.setattr(coordinator, "step", noting)
    job.run()
    monkeypatch.setattr(coordinator, "step", step)
    begins = random.Random(seed).randrange(len(told))
    replica = LogFollower(job.settings)
    monkeypatch.setattr(peers, "_PART_BYTES", 1000)
    parts = list(peers.log_state(1, begins, told[begins][2], typed.from_plain(State, told[begins][0])))
    replica.begin(over_the_wire(structs.replace(parts[0], entries=99, is_last=False)))  # of a leader that is gone
    for part in parts:
        assert replica.known is None
        replica.begin(over_the_wire(part))
    assert len(parts) > 1
    assert typed.to_plain(replica.known.state) == told[begins][0]
    for entries, (_, event, now) in enumerate(told[begins:], start=begins + 1):
        replica.follow(over_the_wire(peers.LogEntry(1, entries, now, event)))
        if entries < len(told):
            assert typed.to_plain(replica.known.state) == told[entries][0]
    assert replica.known.state == job.state


def test_a_log_with_a_gap_is_refused():
    job = nodes_simulation(1)
    replica = LogFollower(job.settings)
    entry = peers.LogEntry(1, 1, 0.0, TimeAdvanced())
    with pytest.raises(ProtocolError):
        replica.follow(entry)
    (whole,) = peers.log_state(1, 3, 0.0, job.state)
    replica.begin(whole)
    for wrong in (entry, peers.LogEntry(2, 4, 0.0, TimeAdvanced())):
        with pytest.raises(ProtocolError):
            replica.follow(wrong)
    replica.follow(peers.LogEntry(1, 4, 0.0, TimeAdvanced()))
    assert replica.known.index.entries == 4


@pytest.mark.parametrize("state", [{}, {"phase": "running"}, {"phase": 7}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ProtocolError):
        LogFollower(Settings(world_size=1)).begin(peers.LogState(1, 0, 0.0, json.dumps(state).encode(), is_last=True))


@pytest.mark.parametrize("offset_s", [-1e6, 1e6])
def test_whoever_goes_on_has_the_clock_of_the_last_coordinator(tmp_path, offset_s):
    """Else every deadline would be over at once, or never come."""

    async def main():
        loop = asyncio.get_running_loop()
        job = nodes_simulation(1)
        known = FollowedLog(LogIndex(1, 7), loop.time() + offset_s, job.state)
        journal = Journal(tmp_path / "journal", job.settings, known.state)
        server = CoordinatorServer(job.settings, None, journal, lambda: None, known)
        assert 0 <= server.now() - known.now < 60
        assert server.entries == 7
        server.close()
        journal.close()

    asyncio.run(main())
