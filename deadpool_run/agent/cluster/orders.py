"""Carries out a leader's messages on this node, and answers its heartbeats."""

from deadpool_run.agent.node.node import LocalNode
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import peers
from deadpool_run.wire.checkpoints import TakeStep
from deadpool_run.wire.stores import IdentifyCallers


def heartbeat_ack(node: LocalNode, heartbeat: peers.Heartbeat, configuration: int, received: int) -> peers.HeartbeatAck:
    """Return the answer of a node that knows this configuration, and got this many of the leader's messages."""
    return peers.HeartbeatAck(
        heartbeat.term,
        heartbeat.sent_at,
        configuration,
        received,
        rank_entries=node.rank_entries(),
        traffic=node.traffic(),
    )


def carry_out(node: LocalNode, message: peers.Message) -> None:
    """Pass a message of the leader to the node. Raises `ProtocolError` for one that is none, or has a value that cannot be."""
    match message:
        case peers.World():
            node.set_world(message)
        case peers.Order(effect, capture_interval, source):
            node.perform(effect, capture_interval, source)
        case peers.Buddies():
            node.set_buddies(message)
        case peers.Committed() | IdentifyCallers():
            _tell(node, message)
        case TakeStep():
            node.participant.take_step(message)
        case peers.Void(attempt):
            node.participant.void(attempt)
        case peers.Load():
            node.participant.load(message)
        case peers.Durable():
            node.newest_durable = message
        case _:
            raise ProtocolError(f"a leader does not send {type(message).__name__}")


def _tell(node: LocalNode, message: peers.Committed | IdentifyCallers) -> None:
    """Pass a message whose values the status page or the kernel checks: versions, and addresses."""
    try:
        if isinstance(message, peers.Committed):
            node.committed(message)
        else:
            node.identify(message)
    except ValueError as error:
        raise ProtocolError(f"a {type(message).__name__} with a wrong value: {error}") from error
