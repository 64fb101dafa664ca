"""What an agent of a job over several nodes lets be seen of it: a record, and where the job is led from.

None of it is needed to train: what a disk refuses is told, and the job goes on.
"""

import asyncio
import socket

from deadpool_run.agent.checkpoint.durable import EXIT_QUEUE_AGAIN
from deadpool_run.agent.cluster import leader_file
from deadpool_run.agent.cluster.leader import Head
from deadpool_run.agent.cluster.shared_folder import End, Meeting
from deadpool_run.agent.cluster.shared_folder import Head as Leader
from deadpool_run.agent.console import tell
from deadpool_run.agent.records.logs import Output
from deadpool_run.agent.records.run_record import RunRecord
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.errors import UsageError
from deadpool_run.ids import NodeId


class Presence:
    """Of one life of a node, in the running loop."""

    def __init__(self, spec: LaunchSpec, node: NodeId, address: str, port: int) -> None:
        """`address` and `port` are where others reach this agent."""
        self._spec = spec
        self._node = node
        self._address = address
        self._port = port
        self._record: RunRecord | None = None
        self._head: Head | None = None
        cluster = spec.cluster
        self._meeting = None if cluster is None or cluster.meeting is None else Meeting(cluster.meeting)

    def follow(self, output: Output) -> None:
        """Be seen as one that follows."""
        try:
            self._record = RunRecord(self._spec, None if output.root is None else str(output.root), head=False)
        except OSError as error:
            tell(f"`deadpool-run status` will not work on this node: {error}")

    async def lead(self, head: Head, term: int) -> None:
        """Be seen as the one that leads from this term on."""
        self._record, self._head = None, head  # it leaves the record now
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._announce, term)
        except (OSError, UsageError) as error:
            tell(f"nobody can be told on the disk that this node leads the job: {error}")

    def close(self, exit_code: int, reason: str, *, fenced: bool) -> None:
        """Leave the records; last of all."""
        if self._record is not None:
            self._record.end(exit_code, reason)
        if self._head is None:
            return
        self._head.close(exit_code, reason)
        if self._meeting is None or fenced:
            return
        try:
            if exit_code == EXIT_QUEUE_AGAIN:
                self._meeting.leave()
            else:
                self._meeting.close(End(exit_code, reason))
        except UsageError as error:
            tell(f"nobody can be told on the disk that the job is over: {error}")

    def _announce(self, term: int) -> None:
        base = self._spec.base_dir or self._spec.run_dir
        here = (socket.gethostname(), self._address, self._port)
        leader_file.write(base, leader_file.Whereabouts(term, self._node, *here, str(self._spec.run_dir)))
        last = None if self._meeting is None or term == 0 else self._meeting.head()
        if self._meeting is not None and last is not None:
            self._meeting.claim(Leader(last.founded + term, self._address, self._port, last.founded))
