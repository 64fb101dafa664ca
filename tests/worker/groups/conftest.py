"""Members on hosts of their own, which are network namespaces."""

import pytest
from kit import netns


@pytest.fixture
def hosts(_warm):
    if reason := netns.refused():
        pytest.skip(reason)
    made = netns.Hosts(4)
    yield made
    made.close()


@pytest.fixture
def world(hosts):
    made = netns.NetworkWorld(3, hosts)
    yield made
    made.close()
