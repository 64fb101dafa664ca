"""Orders as an agent gives them, for tests of either side."""

from typing import Any

from deadpool_run.wire.messages import Assign


def assign(**changed: Any) -> Assign:
    """Return an assignment of the only rank of a world that begins, with these fields changed."""
    fields: dict[str, Any] = {
        "rank": 0,
        "local_rank": 0,
        "epoch": 1,
        "env": {},
    }
    return Assign(**fields | changed)
