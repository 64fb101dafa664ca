"""Whether a rehearsal counts: a replacement must have made what set-up and the first steps made on the rank's first owner.

That is: every protected optimizer has stepped that stepped there, DDP has decided its buckets where it had, and the
transcript was played to its end without a miss. What a rehearsal left out would be missing from the first true step:
optimizer state, buckets that reduce other parameters together, groups.
"""

from dataclasses import dataclass, field

from deadpool_run.errors import RehearsalError
from deadpool_run.worker.groups.transcript import Transcript


@dataclass(slots=True)
class Made:
    """What the steps so far have made."""

    optimizers: set[str] = field(default_factory=set)
    """Names of the protected optimizers that have stepped."""
    buckets: list[bool] = field(default_factory=list)
    """Of each DDP, whether it has decided its buckets."""


class Rehearsal:
    """What the first steps do, on the rank's first owner and on a replacement. For the main thread."""

    def __init__(self) -> None:
        self.made = Made()
        self._raised: Exception | None = None

    def raised(self, error: Exception) -> None:
        """Note what a rehearsed step raised: empty answers may be to blame, so that it counts only if something is missing."""
        self._raised = self._raised or error

    def write_into(self, transcript: Transcript) -> None:
        """Keep what was made with the transcript."""
        transcript.facts = {"optimizers": sorted(self.made.optimizers), "buckets": self.made.buckets}

    def check(self, transcript: Transcript) -> None:
        """Raise `RehearsalError` if this rehearsal lacks something that the recorded steps made."""
        lacks = list(self._lacks(transcript))
        if not lacks:
            return
        cause = f" It raised {type(self._raised).__name__}: {self._raised}" if self._raised is not None else ""
        raise RehearsalError(
            f"the rehearsal of set-up and the first steps did not do what they did before: {'; '.join(lacks)}.{cause}\n"
            "Let the script do the same work while job.rehearsing is true, and leave out only output."
        ) from self._raised

    def _lacks(self, transcript: Transcript) -> list[str]:
        found = []
        facts = transcript.facts
        missing = [name for name in facts.get("optimizers", []) if name not in self.made.optimizers]
        if missing:
            found.append(f"{', '.join(map(repr, missing))} did not step")
        if transcript.misses:
            found.append(f"{transcript.misses} collectives were other ones ({transcript.first_miss})")
        left = transcript.left
        if left:
            found.append(f"{left} collectives were not called")
        decided = facts.get("buckets", [])
        if any(then and not now for then, now in zip(decided, self.made.buckets, strict=False)):
            found.append("DDP has not decided its buckets")
        return found
