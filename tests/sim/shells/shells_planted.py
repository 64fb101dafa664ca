"""Planted bugs in the shells that the stories must find. Each replaces one small function during a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from shell_job import SimServer

from deadpool_run.agent.cluster.follower import Follower
from deadpool_run.agent.cluster.followers import Followers
from deadpool_run.agent.cluster.leadership import Leadership
from deadpool_run.agent.cluster.participation import Participation
from deadpool_run.agent.cluster.vote_links import VoteLinks
from deadpool_run.agent.node.node import LocalNode
from deadpool_run.core import events as ev
from deadpool_run.core.leadership import electorate
from deadpool_run.core.leadership.electorate import ElectionRole
from deadpool_run.ids import NodeId
from deadpool_run.transport.connections import Connections
from deadpool_run.transport.link import PeerLink
from deadpool_run.wire import peers

Plant = Callable[[pytest.MonkeyPatch], None]


def reports_that_the_leader_missed_are_not_sent_again(patch):
    def resume(follower, received):
        follower._session.confirmed(received)
        follower._resumed = True

    patch.setattr(Follower, "_resume", resume)


def a_message_counts_before_it_arrives(patch):
    honest = Connections._resume

    def resume(connections, connection, message):
        session = connections._sessions.get(message.node)
        if session is not None:
            session.received += 1
        honest(connections, connection, message)

    patch.setattr(Connections, "_resume", resume)


def orders_between_two_connections_of_a_node_are_lost(patch):
    honest = Connections._send

    def send(connections, node, frame):
        if node in connections._by_node:
            honest(connections, node, frame)

    patch.setattr(Connections, "_send", send)


def heartbeats_have_no_term(patch):
    honest = Leadership.heartbeat

    def heartbeat(leadership):
        made = honest(leadership)
        return None if made is None else replace(made, term=0)

    patch.setattr(Leadership, "heartbeat", heartbeat)


def a_leader_decides_without_authority(patch):
    honest = SimServer.__init__
    patch.setattr(
        SimServer,
        "__init__",
        lambda server, *rest, **options: honest(server, *rest, **options | {"may_decide": lambda: True}),
    )


def authority_lasts_until_its_timer_fires(patch):
    def holds_lease(leadership):
        return leadership.agent.role is ElectionRole.LEADER and leadership.agent.lapsed_at is None

    patch.setattr(Leadership, "holds_lease", holds_lease)


def a_node_rejoins_without_its_workers(patch):
    patch.setattr(LocalNode, "resynced", lambda node: ev.NodeResynced(node.here.node, ()))


def a_closed_connection_counts_as_an_end(patch):
    patch.setattr(Leadership, "suspect", lambda leadership, node: leadership.handle(electorate.AgentEnded(node)))


def an_id_is_used_twice(patch):
    patch.setattr(Connections, "_new_id", lambda _connections, name: NodeId(name))


def a_node_is_admitted_without_authority(patch):
    honest = Followers._admit_joining

    def admit(followers):
        leadership, followers._leadership = followers._leadership, _Bold(followers._leadership)
        try:
            honest(followers)
        finally:
            followers._leadership = leadership

    patch.setattr(Followers, "_admit_joining", admit)


class _Bold:
    """Leadership that always claims a lease."""

    def __init__(self, leadership):
        self._leadership = leadership

    def __getattr__(self, name):
        return getattr(self._leadership, name)

    def holds_lease(self):
        return True


def an_agent_redirects_others_to_itself(patch):
    patch.setattr(Leadership, "leader", property(lambda leadership: leadership._addresses[leadership.agent.me]))
    patch.setattr(Participation, "_redirect", _redirect_here)


def _redirect_here(member, connection):
    link = PeerLink(connection, lambda _: None)
    link.send(peers.Redirect(member._here, member.leadership.agents()))
    link.close_when_flushed()


def agents_without_a_vote_do_not_learn_the_leader(patch):
    patch.setattr(Leadership, "claim", lambda _leadership, _others: None)


def workers_without_a_leader_continue(patch):
    patch.setattr(LocalNode, "suspend", lambda _node: None)


def stopped_workers_are_not_continued(patch):
    patch.setattr(LocalNode, "resume", lambda _node: None)


def the_connection_with_the_last_leader_is_kept(patch):
    honest = Participation.follow

    def follow(member, leader, term):
        member._follower = None
        honest(member, leader, term)

    patch.setattr(Participation, "follow", follow)


def a_closed_follower_continues_to_dial(patch):
    honest = Follower.close

    def close(follower):
        follower._task = None
        honest(follower)

    patch.setattr(Follower, "close", close)


def events_that_waited_for_authority_are_forgotten(patch):
    honest = SimServer.resume

    def resume(server):
        server._events.clear()
        honest(server)

    patch.setattr(SimServer, "resume", resume)


def later_voters_do_not_get_the_log(patch):
    def decided(followers):
        if followers._leadership.agent.configuration.number < 3:
            honest(followers)

    honest = Followers.decided
    patch.setattr(Followers, "decided", decided)


def a_silent_connection_is_trusted(patch):
    honest = Follower.keep_connected
    patch.setattr(
        Follower,
        "keep_connected",
        lambda follower, node, term, dial, _silence_s: honest(follower, node, term, dial, 1e6),
    )


def a_probe_leaves_the_last_connection_open(patch):
    honest = VoteLinks._is_connected

    async def is_connected(links, peer):
        links._links.pop(peer.node, None)
        return await honest(links, peer)

    patch.setattr(VoteLinks, "_is_connected", is_connected)


def a_refused_connection_ends_the_search_for_the_leader(patch):
    honest = Participation._is_followed

    async def is_followed(member, leader, term):
        await honest(member, leader, term)
        await asyncio.sleep(0)
        return True

    patch.setattr(Participation, "_is_followed", is_followed)


PLANTS: dict[Plant, str] = {
    reports_that_the_leader_missed_are_not_sent_again: "calm",
    a_message_counts_before_it_arrives: "calm",
    orders_between_two_connections_of_a_node_are_lost: "calm",
    heartbeats_have_no_term: "hard",
    a_leader_decides_without_authority: "hard",
    authority_lasts_until_its_timer_fires: "hard",
    a_node_rejoins_without_its_workers: "hard",
    a_closed_connection_counts_as_an_end: "calm",
    an_id_is_used_twice: "hard",
    a_node_is_admitted_without_authority: "wild",
    an_agent_redirects_others_to_itself: "hard",
    agents_without_a_vote_do_not_learn_the_leader: "hard",
    workers_without_a_leader_continue: "hard",
    stopped_workers_are_not_continued: "calm",
    the_connection_with_the_last_leader_is_kept: "hard",
    a_closed_follower_continues_to_dial: "calm",
    events_that_waited_for_authority_are_forgotten: "calm",
    later_voters_do_not_get_the_log: "hard",
    a_silent_connection_is_trusted: "calm",
    a_probe_leaves_the_last_connection_open: "calm",
    a_refused_connection_ends_the_search_for_the_leader: "hard",
}
"""Each bug, with the kind of stories that must find it."""
