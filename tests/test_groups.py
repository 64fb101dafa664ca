"""Tests of one group run on one worker of pytest-xdist: what they share is made once, and jobs of several hosts never overlap."""

import pytest


@pytest.mark.xdist_group("groups")
def test_groups_have_effect(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells the scheduler of a group by the test's name, which not every pytest allows."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("the tests are not distributed by groups")
    assert request.node.nodeid.endswith("@groups"), (
        "this pytest and this pytest-xdist ignore groups: see constraints.txt"
    )
