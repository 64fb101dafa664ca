"""The committed version: the newest snapshot that all buddies of every rank hold, as the ranks' nodes report.

Versions are counted, never intersected, so the cost of a report does not grow with the world.
"""

from collections import Counter
from dataclasses import dataclass

from deadpool_run.ids import Rank, Version

_NONE = Version(-1)
_MAX_KEPT = 1024
MAX_TOLD = 56
"""The most abandoned versions that a status page has room for."""


@dataclass(frozen=True, slots=True)
class _Safe:
    versions: frozenset[Version] = frozenset()
    transcript: bool = False

    @property
    def newest(self) -> Version:
        return max(self.versions, default=_NONE)


class Commits:
    """The versions that are safe in one timeline. Reports of other timelines are ignored."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._newest = _NONE
        self.begin(0)

    def begin(self, timeline: int) -> None:
        """Begin a generation: nothing is safe, nothing committed."""
        self._timeline = timeline
        self._resumed = _NONE
        self._committed = _NONE
        self._forget_safe()
        self._abandoned: set[Version] = set()
        self._dropped = _NONE
        """Abandoned versions up to this one are no longer listed. None of them is committed."""

    def discard_above(self, timeline: int, version: Version) -> None:
        """Begin a timeline that resumes from this version: newer ones may be made again, and every rank reports again.

        The committed version stays, unless it is newer.
        """
        self._timeline = timeline
        self._resumed = version
        self._committed = min(self._committed, version)
        self._forget_safe()
        self._abandoned = {each for each in self._abandoned if self._committed < each <= version}
        self._dropped = min(self._dropped, version)

    def safe(self, rank: Rank, versions: tuple[Version, ...], transcript: bool, timeline: int) -> None:
        """Note what all buddies of a rank hold."""
        if timeline != self._timeline or not 0 <= rank < self._world_size:
            return
        before, now = self._safe[rank], _Safe(frozenset(versions), transcript)
        self._safe[rank] = now
        self._transcripts += now.transcript - before.transcript
        self._count -= Counter(before.versions - now.versions)  # versions that no rank holds any more are left out
        for version in sorted(now.versions - before.versions):
            self._add(version)
        self._newest = max(self._newest, now.newest)
        self._pass_over(before, now)
        self._commit()

    def replaced(self, rank: Rank) -> None:
        """Note that a rank has other buddies, so it is not known what they all hold."""
        self.safe(rank, (), transcript=False, timeline=self._timeline)

    def skipped(self, rank: Rank, version: Version) -> None:
        """Note that a rank will never hold this version."""
        if 0 <= rank < self._world_size:
            self._abandon(version)

    @property
    def committed(self) -> Version | None:
        """The newest version that was safe for every rank at one time. Decreases only if all ranks resume from an older one."""
        return None if self._committed == _NONE else self._committed

    @property
    def abandoned(self) -> frozenset[Version]:
        """Versions above the committed one that will never be committed, so that ranks may overwrite them.

        Of more than fit, those that some rank holds, and then the newest.
        """
        if len(self._abandoned) <= MAX_TOLD:
            return frozenset(self._abandoned)
        wanted = sorted(self._abandoned, key=lambda each: (each in self._count, each))
        return frozenset(wanted[-MAX_TOLD:])

    @property
    def protected(self) -> bool:
        """Whether every transcript is safe now, and some version for all ranks.

        A version before the one that the ranks resumed from does not count: replaced ranks do not hold it, so it is about to go.
        Nor does one before the committed version, which new buddies may have: ranks may have overwritten it.
        """
        newest = max((version for version, count in self._count.items() if count == self._world_size), default=_NONE)
        return (
            self._transcripts == self._world_size and newest > _NONE and newest >= max(self._resumed, self._committed)
        )

    def _forget_safe(self) -> None:
        self._safe = [_Safe()] * self._world_size
        self._count: Counter[Version] = Counter()
        self._transcripts = 0
        self._newest = _NONE

    def _add(self, version: Version) -> None:
        self._count[version] += 1
        # This is the first report of the version: other ranks may have skipped it before.
        late = self._count[version] == 1 and self._committed < version < self._newest
        if late and any(version < safe.newest and version not in safe.versions for safe in self._safe):
            self._abandon(version)

    def _pass_over(self, before: _Safe, now: _Safe) -> None:
        """Abandon versions that a rank skipped: a rank reports versions in order, so they will never be complete.

        `_add` finds those that no rank has reported yet.
        """
        if before.versions != now.versions:
            for version in [each for each in self._count if each < now.newest and each not in now.versions]:
                self._abandon(version)

    def _abandon(self, version: Version) -> None:
        if version <= self._committed:
            return
        self._abandoned.add(version)
        if len(self._abandoned) > _MAX_KEPT:
            oldest = min(self._abandoned)
            self._abandoned.discard(oldest)
            self._dropped = max(self._dropped, oldest)

    def _commit(self) -> None:
        whole = {version for version, count in self._count.items() if count == self._world_size} - self._abandoned
        newest = max((version for version in whole if version > self._dropped), default=_NONE)
        if newest > self._committed:
            self._committed = newest
            self._abandoned = {each for each in self._abandoned if each > newest}
