"""The versions that another loss may need, which a node keeps although their owners have dropped them."""

import time
from collections.abc import Collection

from deadpool_run.ids import Version
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.vault.transfer.headers import MAX_HELD, Identity

_PATIENCE_S = 5.0
"""After this long without memory, the last copy may go. Before, another node may take the new one, or memory is freed."""
_UNNEEDED, _NEEDED, _COMMITTED = range(3)


class Retention:
    """A node's knowledge of commits and of the last roll back."""

    def __init__(self) -> None:
        self._committed: int = EMPTY
        """The newest version that was ever committed, unless the ranks resumed from an older one."""
        self._abandoned: frozenset[int] = frozenset()
        self.resumed: int = EMPTY
        """The version from which the ranks resumed last."""

    def committed(self, newest: Version | None, abandoned: Collection[int]) -> None:
        """Note what the leader reports. A new leader begins with no commit: the last one still counts."""
        self._committed = max(self._committed, EMPTY if newest is None else newest)
        self._abandoned = frozenset(abandoned)

    def discard_above(self, version: Version) -> None:
        """Note that the ranks resume from this version."""
        self._committed, self.resumed = min(self._committed, version), version

    def renew(self) -> None:
        """Begin a generation: nothing is committed."""
        self._committed, self._abandoned, self.resumed = EMPTY, frozenset(), EMPTY

    def may_need(self, version: Version) -> bool:
        """Return whether another loss may bring the ranks back to this version, although their nodes do not all have it.

        That is so until the version that they resumed from, or a newer one, is committed: replaced ranks have no older ones.
        Some fetch that version itself now, although they offer copies of others. A new leader may list it, or the committed
        version, as abandoned: they count.
        """
        if not self._committed <= version <= self.resumed:
            return False
        return version == self.resumed or self._committed in (version, EMPTY) or version not in self._abandoned

    def kept(self, here: Collection[Identity], held: Collection[Identity]) -> set[Identity]:
        """Return which of a rank's versions here are kept, of an owner that holds these: its own, and some that may be needed.

        Of these the committed one comes first, and then the newest. There are not more than an answer can list.
        """
        owned = [each for each in here if each in held]
        needed = [each for each in here if each not in held and self.may_need(each[0])]
        needed.sort(key=lambda each: (self._worth(each[0]), each), reverse=True)
        return {*owned, *needed[: max(0, MAX_HELD - len(owned))]}

    def first_to_go(
        self,
        kept: Collection[Identity],
        held: Collection[Identity],
        short_since: float | None,
    ) -> Identity | None:
        """Return which of a rank's versions is given up for memory; None: none of them.

        Never one that its owner holds: it may be about to be committed. The last one, and the committed one, go only if memory
        has been short for a while, because otherwise no new version would ever be protected.
        """
        dropped = [each for each in kept if each not in held]
        if not dropped:
            return None
        first = min(dropped, key=lambda each: (self._worth(each[0]), each))
        if len(kept) > 1 and self._worth(first[0]) < _COMMITTED:
            return first
        is_patient = short_since is None or time.monotonic() - short_since < _PATIENCE_S
        return None if is_patient else first

    def _worth(self, version: Version) -> int:
        if not self.may_need(version):
            return _UNNEEDED
        return _COMMITTED if version == self._committed else _NEEDED
