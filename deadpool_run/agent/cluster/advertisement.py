"""Publishes that an agent takes part in a job over several nodes: in its record on disk, in the leader file, with the authority.

Training needs none of that: an error is printed, and the job continues.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from deadpool_run.agent.authority.bounded import BoundedAuthority
from deadpool_run.agent.authority.claim import LeaderClaim, RunEnd
from deadpool_run.agent.authority.claimant import Claimant
from deadpool_run.agent.checkpoint.leader import EXIT_QUEUE_AGAIN
from deadpool_run.agent.cluster.leader import Leader
from deadpool_run.agent.console import tell
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.records.run_record import RunRecord
from deadpool_run.agent.rendezvous import leader_file
from deadpool_run.agent.rendezvous.leader_file import LeaderFile
from deadpool_run.agent.rendezvous.shared_folder import SharedFolder
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.agent.tasks import Tasks
from deadpool_run.coordinator.sink import Sink
from deadpool_run.errors import AuthorityError, UsageError
from deadpool_run.wire.peers import Peer

_AGAIN_S = 2.0
"""Pause before a claim is repeated that the authority did not answer, or a leader file is written that could not be."""
_GRACE_S = 2.0
"""At the end: how long the disk may take for the leader file."""


class Advertisement:
    """The records that one membership of a node publishes, in the running loop."""

    def __init__(self, spec: LaunchSpec, here: Peer, on_superseded: Callable[[str], None]) -> None:
        """Publish nothing yet. `here` is where others reach this agent. `on_superseded`: the authority has a later leader."""
        self._spec = spec
        self._here = here
        self._record: RunRecord | None = None
        self._leader: Leader | None = None
        self._term: int | None = None
        """The term in which this node leads."""
        self._loop = asyncio.get_running_loop()
        self._on_superseded = on_superseded
        self._tasks = Tasks()
        self._files = Sink("deadpool-leader-file", stays=False)
        assert spec.cluster is not None
        self._cluster = spec.cluster

    def follow(self, output: Logs) -> None:
        """Publish this node as a follower."""
        self._leader = self._term = None
        self._tasks.cancel()
        self._record = RunRecord(self._spec, output.root, leader=False)

    def lead(self, leader: Leader, term: int) -> None:
        """Publish this node as the leader of this term."""
        self._tasks.cancel()  # a claim of an earlier term that has no answer yet would be refused
        if self._record is not None:
            self._record.leave()
        self._record, self._leader = None, leader  # the leader keeps the record now
        self._term = term
        self._files.put(lambda: self._write_leader_file(term))
        if self._cluster.authority is not None:
            self._tasks.start(self._claim(self._cluster.authority, term))

    def close(self, exit_code: int, reason: str, *, fenced: bool) -> None:
        """Complete the records; the last call."""
        self._tasks.cancel()
        if self._record is not None:
            self._record.end(exit_code, reason, over=not fenced)
        if self._leader is not None:
            self._leader.close(exit_code, reason, over=not fenced)
            if not fenced:
                self._publish_end(exit_code, reason)
        self._files.close(_GRACE_S)

    def _publish_end(self, exit_code: int, reason: str) -> None:
        try:
            if self._cluster.authority is not None and exit_code == EXIT_QUEUE_AGAIN:
                self._leave(self._cluster.authority)
            elif self._cluster.authority is not None:
                self._cluster.authority.close_run(RunEnd(exit_code, reason))
        except (AuthorityError, UsageError) as error:
            tell(f"cannot record the end of the job: {error} (a node that comes later would start it again)")
            return
        if exit_code != EXIT_QUEUE_AGAIN:
            self._files.put(self._remove_token)

    def _remove_token(self) -> None:
        if self._cluster.meeting is not None:
            try:
                SharedFolder(self._cluster.meeting).remove_token()
            except UsageError as error:
                tell(f"cannot record the end of the job: {error} (a node that comes later would start it again)")

    def _write_leader_file(self, term: int, *, is_told: bool = False) -> None:
        """Write it, in the thread for files; in a while again if that fails, since a full disk may have room then."""
        base, here = self._spec.base_dir or self._spec.run_dir, self._here
        found = LeaderFile(term, here.node, socket.gethostname(), here.address, here.port, str(self._spec.run_dir))
        try:
            leader_file.write(base, found)
        except OSError as error:
            if not is_told:
                tell(f"cannot write the leader file: {error} (other nodes still find this one over the network)")
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._loop.call_later, _AGAIN_S, self._write_again, term)

    def _write_again(self, term: int) -> None:
        if term == self._term:
            self._files.put(lambda: self._write_leader_file(term, is_told=True))

    async def _claim(self, authority: BoundedAuthority, term: int) -> None:
        """Record that this node leads: for machines that come later, and so that no older leader is taken for this one."""
        claimant = Claimant(authority, self._here, "a machine that restarts may not find the job")
        granted = await claimant.claim(term)
        while granted is None:
            await asyncio.sleep(_AGAIN_S)
            granted = await claimant.claim(term)
        if not granted:
            self._on_superseded("the authority has recorded a later leader, or the end of the run")

    def _leave(self, authority: BoundedAuthority) -> None:
        """Record that no node leads, and that the run may be founded again."""
        last = authority.read().claim
        if last is not None and last.port:
            authority.claim(LeaderClaim(last.term + 1, self._here.node, "", 0, authority.run_id))
