"""Limits of an agent's process, for jobs of many machines."""

import gc
import resource

_ALLOCATIONS = 100_000
"""Objects made until Python looks for cycles among the newest; 700 by default. With the state of ten thousand machines in memory
nearly half of a leader's time went into such searches."""


def raise_limits() -> None:
    """Raise the limit on open files as far as allowed, and search for unused objects less often."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a leader has a connection with every node
    gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])
