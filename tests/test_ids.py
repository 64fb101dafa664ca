"""Names of nodes, as users write them."""

import pytest

from deadpool_run.ids import NodeId, node_called

NAMES = {
    NodeId("gpu07.site.org"): "gpu07.site.org",
    NodeId("gpu08.site.org~2"): "gpu08.site.org",
    NodeId("a"): "a",
    NodeId("a~2"): "a",
    NodeId("twin.east"): "twin.east",
    NodeId("twin.west"): "twin.west",
}


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("gpu07.site.org", "gpu07.site.org"),
        ("gpu07", "gpu07.site.org"),
        ("gpu08.site.org", "gpu08.site.org~2"),
        ("gpu08", "gpu08.site.org~2"),
        ("a", "a"),
        ("a~2", "a~2"),
    ],
)
def test_a_node_is_called_by_its_id_its_name_or_its_host_name(text, node):
    assert node_called(text, NAMES) == node


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("twin", "several nodes are called twin: twin.east, twin.west"),
        ("gpu", "there is no node gpu: nodes are a, a~2, gpu07.site.org, gpu08.site.org~2, twin.east, twin.west"),
        ("", "there is no node : nodes are a, a~2, "),
    ],
)
def test_a_name_of_no_node_or_of_several_is_refused(text, why):
    with pytest.raises(LookupError, match=why.replace("~", ".")):
        node_called(text, NAMES)
