"""A log follower has the coordinator's state, whenever it begins to follow."""

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
def test_a_log_follower_has_the_coordinators_state(seed, monkeypatch):
    told = []
    step = coordinator.step

    def noting(settings, state, event, now):
        told.append((typed.to_plain(state), event, now))
        return step(settings, state, event, now)

    job = nodes_simulation(seed)
    monkeypatch.setattr(coordinator, "step", noting)
    job.run()
    monkeypatch.setattr(coordinator, "step", step)
    rng = random.Random(seed)
    begins = rng.randrange(len(told))
    replica = LogFollower(job.settings)
    monkeypatch.setattr(peers, "_PART_BYTES", 1000)
    parts = list(peers.log_state(1, begins, told[begins][2], typed.from_plain(State, told[begins][0])))
    replica.begin(over_the_wire(structs.replace(parts[0], entries=99, is_last=False)))  # from a lost leader
    for part in parts:
        assert replica.known is None
        replica.begin(over_the_wire(part))
    assert len(parts) > 1
    assert typed.to_plain(replica.known.state) == told[begins][0]
    at = begins
    while at < len(told):
        together = [peers.LogEntry(now, event) for _, event, now in told[at : at + rng.randrange(1, 6)]]
        for frame in peers.log_frames(1, at, together):
            replica.follow(peers.decode(frame[4:]))
        at += len(together)
        assert replica.known.index == LogIndex(1, at)
        if at < len(told):
            assert typed.to_plain(replica.known.state) == told[at][0]
    assert replica.known.state == job.state


def test_a_log_with_a_gap_is_refused():
    job = nodes_simulation(1)
    replica = LogFollower(job.settings)
    two = (peers.LogEntry(0.0, TimeAdvanced()), peers.LogEntry(1.0, TimeAdvanced()))
    with pytest.raises(ProtocolError):
        replica.follow(peers.LogEntries(1, 0, two))
    (whole,) = peers.log_state(1, 3, 0.0, job.state)
    replica.begin(whole)
    for wrong in (peers.LogEntries(1, 2, two), peers.LogEntries(1, 4, two), peers.LogEntries(2, 3, two)):
        with pytest.raises(ProtocolError):
            replica.follow(wrong)
        assert replica.known.index.entries == 3
    replica.follow(peers.LogEntries(1, 3, two))
    assert (replica.known.index.entries, replica.known.now) == (5, 1.0)


def test_a_follower_that_cannot_decide_on_an_event_forgets_its_state(monkeypatch):
    """It does not keep the state before that event either: the leader may have given orders since."""
    job = nodes_simulation(1)
    replica = LogFollower(job.settings)
    (whole,) = peers.log_state(1, 3, 0.0, job.state)
    replica.begin(whole)
    step = coordinator.step

    def fails_late(settings, state, event, now):
        if now > 0:
            raise AssertionError("the second event")
        return step(settings, state, event, now)

    monkeypatch.setattr(coordinator, "step", fails_late)
    with pytest.raises(AssertionError, match="the second event"):
        replica.follow(
            peers.LogEntries(1, 3, (peers.LogEntry(0.0, TimeAdvanced()), peers.LogEntry(1.0, TimeAdvanced())))
        )
    assert replica.known is None


@pytest.mark.parametrize("limit", [1, 3])
def test_events_larger_than_a_frame_are_sent_in_several_messages(limit, monkeypatch):
    entries = [peers.LogEntry(float(at), TimeAdvanced()) for at in range(7)]
    (one,) = peers.log_frames(1, 10, entries[:limit])
    monkeypatch.setattr(peers, "MAX_FRAME_BYTES", len(one) + limit)  # later numbers have more digits
    found = [peers.decode(frame[4:]) for frame in peers.log_frames(1, 10, entries)]
    assert [each.after for each in found] == [
        10 + sum(len(before.entries) for before in found[:at]) for at in range(len(found))
    ]
    assert [entry for each in found for entry in each.entries] == entries
    assert max(len(each.entries) for each in found) <= limit


@pytest.mark.parametrize("state", [{}, {"phase": "running"}, {"phase": 7}])
def test_an_invalid_state_is_refused(state):
    with pytest.raises(ProtocolError):
        LogFollower(Settings(world_size=1)).begin(peers.LogState(1, 0, 0.0, json.dumps(state).encode(), is_last=True))


@pytest.mark.parametrize("offset_s", [-1e6, 1e6])
def test_a_new_coordinator_continues_the_clock_of_the_last_one(tmp_path, offset_s):
    """Otherwise every deadline would pass at once, or never."""

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
