"""Checks that a rehearsal created all that set-up and the first steps created in the rank's first process.

That is: the same protected optimizers have stepped, the same DDPs have decided their buckets, and the transcript was played
to its end without a miss. Anything that a rehearsal skips would be missing in the first real step: optimizer state, groups,
or the same assignment of parameters to buckets.
"""

from typing import Any

from deadpool_run.errors import RehearsalError
from deadpool_run.vault.segments import write_blob
from deadpool_run.worker import prefault
from deadpool_run.worker.process import sources
from deadpool_run.worker.transcript.transcript import Transcript

REHEARSAL_STEPS = 2
"""DDP rebuilds its buckets in the second forward; FSDP2's lazy parts, optimizer state and compilation come earlier."""


class Rehearsal:
    """The first steps, in the rank's first process or in a replacement. For the main thread."""

    def __init__(self) -> None:
        self.optimizers: set[str] = set()
        """Names of the protected optimizers that have stepped."""
        self.buckets: list[bool] = []
        """For each DDP, whether it has decided its buckets."""
        self.total = 0
        """Of the loop's steps."""
        self.variables: dict[str, Any] = {}
        """Facts of the script's variables when the loop began."""
        self._raised: Exception | None = None

    def raised(self, error: Exception) -> None:
        """Note an exception of a rehearsed step: fake results may have caused it, so it counts only if something is missing."""
        self._raised = self._raised or error

    def store(self, transcript: Transcript, fd: int) -> None:
        """Store the transcript with the facts, and mark the memory that a replacement will write first."""
        transcript.facts = {
            "optimizers": sorted(self.optimizers),
            "buckets": self.buckets,
            "sources": sources.record(),
            "total": self.total,
            "variables": self.variables,
        }
        write_blob(fd, transcript.to_bytes())
        prefault.mark()

    def check(self, transcript: Transcript) -> None:
        """Raise `RehearsalError` if this rehearsal lacks something that the recorded steps created."""
        lacks = self._lacks(transcript)
        if not lacks:
            return
        cause = f" It raised {type(self._raised).__name__}: {self._raised}" if self._raised is not None else ""
        raise RehearsalError(
            f"the rehearsal of set-up and the first steps differs from the recorded run: {'; '.join(lacks)}.{cause}\n"
            "Do the same work in the script while job.rehearsing is true, and skip only output."
        ) from self._raised

    def _lacks(self, transcript: Transcript) -> list[str]:
        found = []
        facts = transcript.facts
        if missing := [name for name in facts.get("optimizers", []) if name not in self.optimizers]:
            found.append(f"{', '.join(map(repr, missing))} did not step")
        if transcript.misses:
            found.append(f"{transcript.misses} collectives differ ({transcript.first_miss})")
        if left := transcript.left:
            found.append(f"{left} collectives were not called")
        decided = facts.get("buckets", [])
        if any(then and not now for then, now in zip(decided, self.buckets, strict=False)):
            found.append("DDP has not decided its buckets")
        return found
