"""What an agent of a job over several nodes publishes on disk: its record, and the leader's address.

Training needs none of it: an error of the disk is printed, and the job continues.
"""

import asyncio
import socket

from deadpool_run.agent.authority.claim import RunEnd
from deadpool_run.agent.checkpoint.leader import EXIT_QUEUE_AGAIN
from deadpool_run.agent.cluster import leader_file
from deadpool_run.agent.cluster.leader import Leader
from deadpool_run.agent.cluster.shared_folder import LeaderRecord, SharedFolder
from deadpool_run.agent.console import tell
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.records.run_record import RunRecord
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.errors import UsageError
from deadpool_run.ids import NodeId


class Advertisement:
    """The files of one membership of a node, in the running loop."""

    def __init__(self, spec: LaunchSpec, node: NodeId, address: str, port: int) -> None:
        """`address` and `port` are where others reach this agent."""
        self._spec = spec
        self._node = node
        self._address = address
        self._port = port
        self._record: RunRecord | None = None
        self._leader: Leader | None = None
        cluster = spec.cluster
        self._folder = None if cluster is None or cluster.meeting is None else SharedFolder(cluster.meeting)

    def follow(self, output: Logs) -> None:
        """Publish this node as a follower."""
        self._leader = None
        try:
            self._record = RunRecord(self._spec, output.root, leader=False)
        except OSError as error:
            tell(f"cannot write this node's record: {error} (`deadpool-run status` will not work here)")

    async def lead(self, leader: Leader, term: int) -> None:
        """Publish this node as the leader of this term."""
        self._record, self._leader = None, leader  # the leader keeps the record now
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._announce, term)
        except (OSError, UsageError) as error:
            tell(f"cannot write the leader file: {error} (other nodes still find this one over the network)")

    def close(self, exit_code: int, reason: str, *, fenced: bool) -> None:
        """Complete the records; the last call."""
        if self._record is not None:
            self._record.end(exit_code, reason)
        if self._leader is None:
            return
        self._leader.close(exit_code, reason)
        if self._folder is None or fenced:
            return
        try:
            if exit_code == EXIT_QUEUE_AGAIN:
                self._folder.leave()
            else:
                self._folder.close(RunEnd(exit_code, reason))
        except UsageError as error:
            tell(f"cannot record the end of the job: {error} (a node that comes later would start it again)")

    def _announce(self, term: int) -> None:
        base = self._spec.base_dir or self._spec.run_dir
        here = (socket.gethostname(), self._address, self._port)
        leader_file.write(base, leader_file.LeaderFile(term, self._node, *here, str(self._spec.run_dir)))
        last = None if self._folder is None or term == 0 else self._folder.leader()
        if self._folder is not None and last is not None:
            self._folder.claim(LeaderRecord(last.founded + term, self._address, self._port, last.founded))
