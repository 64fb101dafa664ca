"""Example orders of an agent, for tests of agents and workers."""

from typing import Any

from deadpool_run.wire.messages import Assign


def assign(**changed: Any) -> Assign:
    """Return the first assignment in a world of one rank, with these fields changed."""
    fields: dict[str, Any] = {
        "rank": 0,
        "local_rank": 0,
        "epoch": 1,
        "env": {},
    }
    return Assign(**fields | changed)
