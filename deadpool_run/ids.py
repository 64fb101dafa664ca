"""Typed identifiers: what a number stands for is part of its type."""

from collections.abc import Callable, Mapping
from typing import NewType

from deadpool_run.text import shortened

PACKAGE = __name__.partition(".")[0]
"""The package's name: the first part of the names of its modules."""


def is_of_package(module: str) -> bool:
    """Return whether a module, given by its full name, is one of this package."""
    return module.partition(".")[0] == PACKAGE


Rank = NewType("Rank", int)
"""A logical place in the world, 0..W-1. Changes hands only by promotion."""

WorkerId = NewType("WorkerId", int)
"""One life of one process. Never used again within a job, so a late message from a dead worker is recognised as stale."""

Epoch = NewType("Epoch", int)
"""Number of a membership. Each rebuild and each restart raises it by at least one; it never falls."""

Version = NewType("Version", int)
"""Number of completed steps that a snapshot stands for: version k is the state after k steps, 0 the state after set-up."""

NodeId = NewType("NodeId", str)
"""A failure domain: one life of one agent. An agent that is cut off and joins again is another node."""


def first_id(name: str, founded: int) -> NodeId:
    """Return the id of the first life of the agent with this name, in a run that was founded in this term.

    Agents of an earlier founding may be left somewhere, so none of their ids is given again.
    """
    return NodeId(f"{name}~r{founded}" if founded else name)


_NAMED = 8
"""Most nodes that a message names."""
_FORMS: tuple[Callable[[str, str], str], ...] = (
    lambda node, _: node,
    lambda _, name: name,
    lambda _, name: name.partition(".")[0],
)
"""The names of a node in the order in which they are looked for: its id, the name of its machine, and that without a domain."""


def node_called(text: str, names: Mapping[NodeId, str]) -> NodeId:
    """Return the node of this id, else the only one of this name. `names`: the name of each node's machine.

    Raises LookupError, which says what is wrong.
    """
    for form in _FORMS:
        found = [node for node, name in names.items() if form(node, name) == text]
        if len(found) == 1:
            return found[0]
        if found:
            raise LookupError(f"several nodes are called {text}: {shortened(sorted(found), _NAMED)}")
    raise LookupError(f"there is no node {text}: nodes are {shortened(sorted(names), _NAMED)}")


ONLY_NODE = NodeId("node")
"""Name of the node of a job on one machine."""
