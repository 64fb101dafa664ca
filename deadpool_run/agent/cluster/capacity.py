"""Limits of an agent's process: open files, and the search for unused objects in jobs of many machines."""

import gc
import resource

from deadpool_run.core.settings import Settings

_ALLOCATIONS = 100_000
"""Objects made until Python looks for cycles among the newest; 700 by default. With the state of ten thousand machines in memory
nearly half of a leader's time went into such searches."""
_FILES, _FILES_OF_A_PROCESS, _FILES_OF_A_NODE = 64, 20, 4
"""Descriptors of an agent: for itself, for each process of its machine (its socket, memory, copies and log files), and as a leader for
each other machine, which is dialled once more in an election."""


def raise_limits(settings: Settings) -> str:
    """Raise the limits as far as allowed; return a line for the user if that is too little for the job, else an empty text.

    Workers keep the user's soft limit on open files: the fork server has it.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    nodes = settings.nodes + settings.spare_nodes
    if nodes > 1:
        gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])
    processes = settings.ranks_per_node + settings.spares
    wanted = _FILES + _FILES_OF_A_PROCESS * processes + _FILES_OF_A_NODE * (nodes - 1)
    if most == resource.RLIM_INFINITY or most >= wanted:
        return ""
    return (
        f"the limit on open files is {most}, and {processes} processes on each of {nodes} machines may need {wanted}: if the job fails "
        f"with `Too many open files`, raise the hard limit (LimitNOFILE= of a systemd unit, `ulimit -n {wanted}` as root, "
        "--ulimit nofile of a container)"
    )
