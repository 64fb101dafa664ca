"""Digest of a world of `election_model`, to tell whether a search has been in the same state before."""

from collections.abc import Mapping
from typing import Any

from election_model import Host, World

from deadpool_run.core.leadership import electorate as el


def digest(world: World) -> int:
    """Return a digest of the state without its history; times count from now."""
    now = world.now
    order = sorted((seq, link, message) for link, queue in world.links.items() for seq, message in queue)
    return hash(
        (
            tuple(_host_key(host, now) for host in world.hosts.values()),
            tuple((link, _message_key(message, now)) for _, link, message in order),
            tuple((until - now, *rest) for until, *rest in world.bad),
            world.granted,
        )
    )


def _since(at: float | None, now: float) -> float | None:
    return None if at is None else at - now


def _times(times: Mapping[Any, float], now: float) -> frozenset[tuple[Any, float]]:
    return frozenset((name, at - now) for name, at in times.items())


def _host_key(host: Host, now: float) -> Any:
    agent = host.agent
    return (
        (
            host.behind,
            _since(host.wakes_at, now),
            _since(host.frozen_at, now),
            host.dead,
            host.beat_at - now,
            host.lost,
        ),
        (
            agent.role,
            agent.configurations,
            agent.term,
            agent.ended,
            agent.ruled_out,
            agent.refused,
            agent.log,
            agent.voted_term,
        ),
        (agent.voted_for, agent.seen, agent.suspended, agent.candidate_term, agent.votes),
        (agent.heard_at - now, agent.governed_at - now, agent.woken_at - now, agent.looked_at - now),
        (agent.began_at - now, agent.asked_at - now, agent.candidacies_from - now, _since(agent.lapsed_at, now)),
        frozenset((sent_at - now, got.at - now, got.sent_after - now) for sent_at, got in agent.heartbeats.items()),
        (_times(agent.answers, now), _times(agent.answered_at, now), frozenset(agent.known.items())),
    )


def _message_key(message: Any, now: float) -> Any:
    match message:
        case ("beat", term, heard, log):
            times = (heard.sent_at, heard.answered, heard.lease_from)
            return term, heard.configurations, tuple(_since(at, now) for at in times), log
        case ("claim", term, configurations, sent_at):
            return term, configurations, sent_at - now
        case el.HeardFromAgent(agent, term, sent_at, configuration):
            return agent, term, sent_at - now, configuration
        case _:
            return message
