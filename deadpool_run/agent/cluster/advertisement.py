"""What an agent of a job over several nodes lets be seen of it: a record, and where the job is led from.

None of it is needed to train: what a disk refuses is told, and the job goes on.
"""

import asyncio
import socket

from deadpool_run.agent.checkpoint.leader import EXIT_QUEUE_AGAIN
from deadpool_run.agent.cluster import leader_file
from deadpool_run.agent.cluster.leader import Leader
from deadpool_run.agent.cluster.shared_folder import LeaderRecord, RunEnd, SharedFolder
from deadpool_run.agent.console import tell
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.records.run_record import RunRecord
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.errors import UsageError
from deadpool_run.ids import NodeId


class Advertisement:
    """Of one life of a node, in the running loop."""

    def __init__(self, spec: LaunchSpec, node: NodeId, address: str, port: int) -> None:
        """`address` and `port` are where others reach this agent."""
        self._spec = spec
        self._node = node
        self._address = address
        self._port = port
        self._record: RunRecord | None = None
        self._leader: Leader | None = None
        cluster = spec.cluster
        self._meeting = None if cluster is None or cluster.meeting is None else SharedFolder(cluster.meeting)

    def follow(self, output: Logs) -> None:
        """Be seen as one that follows."""
        try:
            self._record = RunRecord(self._spec, None if output.root is None else str(output.root), leader=False)
        except OSError as error:
            tell(f"`deadpool-run status` will not work on this node: {error}")

    async def lead(self, leader: Leader, term: int) -> None:
        """Be seen as the one that leads from this term on."""
        self._record, self._leader = None, leader  # it leaves the record now
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._announce, term)
        except (OSError, UsageError) as error:
            tell(f"nobody can be told on the disk that this node leads the job: {error}")

    def close(self, exit_code: int, reason: str, *, fenced: bool) -> None:
        """Leave the records; last of all."""
        if self._record is not None:
            self._record.end(exit_code, reason)
        if self._leader is None:
            return
        self._leader.close(exit_code, reason)
        if self._meeting is None or fenced:
            return
        try:
            if exit_code == EXIT_QUEUE_AGAIN:
                self._meeting.leave()
            else:
                self._meeting.close(RunEnd(exit_code, reason))
        except UsageError as error:
            tell(f"nobody can be told on the disk that the job is over: {error}")

    def _announce(self, term: int) -> None:
        base = self._spec.base_dir or self._spec.run_dir
        here = (socket.gethostname(), self._address, self._port)
        leader_file.write(base, leader_file.LeaderFile(term, self._node, *here, str(self._spec.run_dir)))
        last = None if self._meeting is None or term == 0 else self._meeting.leader()
        if self._meeting is not None and last is not None:
            self._meeting.claim(LeaderRecord(last.founded + term, self._address, self._port, last.founded))
