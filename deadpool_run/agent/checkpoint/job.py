"""The job, as the leader of durable checkpoints sees it."""

from typing import Protocol

from deadpool_run.core.state import State
from deadpool_run.ids import NodeId
from deadpool_run.wire import peers


class CheckpointedJob(Protocol):
    """A job with durable checkpoints: its nodes and its coordinator."""

    @property
    def here(self) -> NodeId:
        """The leader's own node."""

    @property
    def alone(self) -> bool:
        """Whether that is the job's only node."""

    @property
    def state(self) -> State:
        """The coordinator's state, to read only."""

    def tell_node(self, node: NodeId, message: peers.ToNode) -> None:
        """Send a message to a node, the leader's own included."""

    def tell_all(self, message: peers.ToNode) -> None:
        """Send a message to every node."""

    def print_line(self, line: str) -> None:
        """Print a line for the user."""

    def cannot_begin(self, why: str) -> None:
        """End the job: it cannot begin from the checkpoint that it was given."""

    def leave(self) -> None:
        """End the job after a preemption notice: its state is saved."""
