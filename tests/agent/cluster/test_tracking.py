"""A leader's messages to nodes about copies: each is sent once."""

from deadpool_run.agent.cluster.tracking import Tracking
from deadpool_run.core import coordinator
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.ids import NodeId


def test_a_new_leader_tells_every_node_its_part_once_also_one_that_has_none_now():
    """Under the last leader it may have had a rank, of which it would go on to send copies and reports."""
    settings = Settings(world_size=2, nodes=2, spare_nodes=1)
    state = coordinator.new_state(settings)
    coordinator.step(settings, state, ev.JobSubmitted(NodeId("a"), ev.Place("a")), 0.0)
    for name in ("b", "c"):
        coordinator.step(settings, state, ev.NodeJoined(NodeId(name), ev.Place(name)), 0.0)
    tracking = Tracking(settings.world_size)
    assert {node for node, _ in tracking.buddies_news(state, lambda _: None)} == {"a", "b", "c"}
    assert not list(tracking.buddies_news(state, lambda _: None))
