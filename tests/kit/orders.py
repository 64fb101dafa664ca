"""Orders as an agent gives them, for tests of either side."""

from typing import Any

from deadpool_run.wire.messages import Assign


def assign(**changed: Any) -> Assign:
    """Return an assignment of the only rank of a world that begins, with these fields changed."""
    fields: dict[str, Any] = {
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "epoch": 1,
        "replacement": False,
        "store_host": "127.0.0.1",
        "store_port": 1,
        "capture_interval": 1,
        "env": {},
    }
    return Assign(**fields | changed)
