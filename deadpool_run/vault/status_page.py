"""The status page: shared memory of a node with an entry per rank, written with plain stores.

A worker publishes its phase and its snapshots without a system call; its peers on the node derive the committed version
from them; the agent reads them for status and hang detection. An entry has one writer at a time: the worker that holds the
rank (the agent only while no worker does, or while the worker waits for the agent). Every word is an aligned 8-byte
integer, so that a reader sees either the old or the new value.

If a job spans nodes, other ranks' entries are on other status pages. Then the agent publishes the committed version in the
header, and mirrors the entries of other nodes' ranks, for status only.

The last words of an entry are always the agent's: what the rank's process and its GPU use, for viewers.
"""

import mmap
import os
import struct
from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum

from deadpool_run.ids import Version

WORDS = 20
RANK_ENTRY_BYTES = WORDS * 8
_SLOT0, _SKIPPED, _TAKEN, _COPYING, _GROWING, _USED = 6, 8, 9, 12, 15, 16
"""Indices of words in a rank entry, as in `RankEntry`."""
_HEADER_WORDS = 64
_COMMITTED = 1
_ABANDONED_COUNT = 2
_KEPT = 3
"""Holds `StatusPage.kept` plus 1, so that 0 is none."""
_ABANDONED = 8
MAX_ABANDONED = _HEADER_WORDS - _ABANDONED
"""The number of abandoned versions that fit into the header."""

EMPTY = -1
"""A slot that holds nothing."""
BUSY = -2
"""A slot that is being written."""
FROM_RANK_ENTRIES = -2
"""In place of the committed version: read it from the rank entries, all of which are written here."""


class Phase(IntEnum):
    """The phase of a rank's worker."""

    NONE = 0
    SETUP = 1
    REHEARSAL = 2
    STEP = 3
    OPTIMIZER = 4
    BETWEEN = 5
    ABORTED = 6
    RESTORING = 7
    ATTACHING = 8
    FINISHED = 9
    HELD = 10
    """Between two steps, on order: a rank is about to move."""


class Copying(IntEnum):
    """The state of a rank's copy thread."""

    NOTHING = 0
    WAITING = 1
    """For a free slot."""
    WRITING = 2


class DeviceLibrary(IntEnum):
    """The library for collectives on this node's GPUs."""

    NONE = 0
    """Only Gloo, on CPUs; or no rank has called `init()`."""
    NCCL = 1
    NCCL2 = 2
    OTHER = 3

    @classmethod
    def named(cls, name: str) -> "DeviceLibrary":
        """Return the library that torch, or a test, calls so."""
        return cls.__members__.get(name.upper(), cls.OTHER)


class _Field:
    """A word of a rank entry or of the header, as an attribute."""

    def __init__(self, word: int) -> None:
        self._word = word

    def __get__(self, words: "RankEntry | StatusPage", owner: type["RankEntry | StatusPage"]) -> int:
        return words._words[words._first_word + self._word]  # noqa: SLF001 - part of the class

    def __set__(self, words: "RankEntry | StatusPage", value: int) -> None:
        words._words[words._first_word + self._word] = value  # noqa: SLF001 - part of the class


class RankEntry:
    """The words of one rank. Every read or write is one load or store; nothing blocks."""

    __slots__ = ("_first_word", "_words")

    worker = _Field(0)  # the worker that holds the rank
    epoch = _Field(1)  # the epoch that its communicators are attached to
    phase = _Field(2)  # a Phase
    completed = _Field(3)  # steps completed
    issued = _Field(4)  # collectives issued in this epoch
    waited = _Field(5)  # those of them that have completed
    skipped = _Field(_SKIPPED)  # the newest version whose capture was skipped, or EMPTY
    taken = _Field(_TAKEN)  # bytes of the rank's slots
    step_ns = _Field(10)  # duration of the last step
    capture_ns = _Field(11)  # duration of the last capture
    copying = _Field(_COPYING)  # a Copying: from the start of a capture until its version is held or skipped
    marked_step = _Field(13)  # the newest step with a mark, plus 1; 0: none
    mark = _Field(14)  # the mark of that step: see worker.groups.marks
    growing = _Field(_GROWING)  # bytes that the worker is about to take; below 0: that there was no memory for
    cpu_millis = _Field(
        _USED
    )  # thousandths of a core that its process used lately. This and the next: EMPTY if not known
    memory = _Field(_USED + 1)  # resident bytes of its process
    gpu_percent = _Field(_USED + 2)  # share of the time in which its GPU was busy
    gpu_memory = _Field(_USED + 3)  # bytes in use on its GPU, by all processes

    def __init__(self, words: memoryview, rank: int) -> None:
        self._words = words
        self._first_word = _HEADER_WORDS + rank * WORDS

    def clear(self, *, keep_slots: bool) -> None:
        """Reset the entry for a new owner; with `keep_slots`, keep the snapshots, their memory and the mark."""
        slots, taken, marked = self.slots, self.taken, (self.marked_step, self.mark)
        for word in range(WORDS):
            self._words[self._first_word + word] = 0
        for word in (_SKIPPED, *range(_USED, WORDS)):
            self._words[self._first_word + word] = EMPTY
        for slot in (0, 1):
            self.set_slot(slot, slots[slot] if keep_slots else EMPTY)
        if keep_slots:
            self.taken = taken
            self.marked_step, self.mark = marked

    @property
    def slots(self) -> tuple[int, int]:
        """The version that each slot holds complete, or `EMPTY` or `BUSY`."""
        return self._words[self._first_word + _SLOT0], self._words[self._first_word + _SLOT0 + 1]

    def set_slot(self, slot: int, version: int) -> None:
        """Publish what a slot holds: `BUSY` before its first byte changes, the version after the last."""
        self._words[self._first_word + _SLOT0 + slot] = version

    def words(self) -> tuple[int, ...]:
        """Return all words, for a mirror on another node's status page."""
        return tuple(self._words[self._first_word : self._first_word + WORDS])

    def mirror(self, words: Sequence[int]) -> None:
        """Mirror a rank entry of another node, except its use of memory there: no process here waits for that. Raises ValueError."""
        if len(words) != WORDS:
            raise ValueError(f"a rank entry has {WORDS} words, not {len(words)}")
        for word, value in enumerate(words):
            is_local = word in (_COPYING, _TAKEN) or (word == _GROWING and value > 0)
            self._words[self._first_word + word] = 0 if is_local else value

    @property
    def held(self) -> tuple[Version, ...]:
        """The complete versions, oldest first."""
        return tuple(sorted(Version(version) for version in self.slots if version >= 0))


class StatusPage:
    """A view of a node's status page. `close` unmaps it; the caller keeps the descriptor."""

    _first_word = 0
    device_library = _Field(0)  # a DeviceLibrary, as every rank of this node writes it in init()
    copies_growing = _Field(4)  # bytes that copies of other nodes' ranks are about to take
    copies_taken = _Field(5)  # bytes that such copies have
    memory_limit = _Field(6)
    """The most bytes that snapshots and copies of this node may take; 0: no limit but the machine's."""
    total_steps = _Field(7)
    """The steps of the loop, as every rank of this node writes it when its loop begins; 0: not known."""

    def __init__(self, fd: int, world_size: int) -> None:
        """Map the status page. Raises ValueError unless its size is that of `world_size` ranks."""
        self.fd = fd
        size = status_page_bytes(world_size)
        if os.fstat(fd).st_size != size:
            raise ValueError(f"a status page of {world_size} ranks has {size} bytes, not {os.fstat(fd).st_size}")
        self._mmap = mmap.mmap(fd, size)
        self._words = memoryview(self._mmap).cast("q")
        self.rank_entries = tuple(RankEntry(self._words, rank) for rank in range(world_size))

    def publish(self, committed: Version | None, abandoned: Collection[int]) -> None:
        """Publish the committed version, and versions above it that never will be. For the agent.

        From now on these replace the rank entries. Only the newest `MAX_ABANDONED` abandoned versions are kept. A reader may
        see parts of the old and of the new list: both are valid.
        """
        newest = sorted(abandoned)[-MAX_ABANDONED:]
        self._words[_COMMITTED] = EMPTY if committed is None else committed
        self._words[_ABANDONED_COUNT] = 0
        for at, version in enumerate(newest):
            self._words[_ABANDONED + at] = version
        self._words[_ABANDONED_COUNT] = len(newest)

    def words(self) -> Iterator[tuple[int, ...]]:
        """Yield `RankEntry.words` of each rank, in a fraction of the time."""
        return struct.iter_unpack(f"{WORDS}q", self._words[_HEADER_WORDS:])

    @property
    def spans_nodes(self) -> bool:
        """Whether the agent publishes the committed version, because peers live on other nodes."""
        return bool(self._words[_COMMITTED] != FROM_RANK_ENTRIES)

    @property
    def growing(self) -> int:
        """How many bytes workers and copies of this node are about to take, all together."""
        return self.copies_growing + sum(max(0, rank_entry.growing) for rank_entry in self.rank_entries)

    @property
    def taken(self) -> int:
        """How many bytes snapshots and copies of this node have, all together."""
        return self.copies_taken + sum(rank_entry.taken for rank_entry in self.rank_entries)

    @property
    def kept(self) -> int:
        """The version that is being copied for a durable checkpoint and must not be overwritten; `EMPTY`: none."""
        return self._words[_KEPT] - 1

    @kept.setter
    def kept(self, version: int) -> None:
        self._words[_KEPT] = version + 1

    def committed(self) -> Version | None:
        """Return the newest version that every rank holds complete (and, with several nodes, its buddies), or None."""
        published = self._words[_COMMITTED]
        if published != FROM_RANK_ENTRIES:
            return Version(published) if published >= 0 else None
        common = set(self.rank_entries[0].slots)
        for rank_entry in self.rank_entries[1:]:
            common.intersection_update(rank_entry.slots)
        newest = max(common, default=EMPTY)
        return Version(newest) if newest >= 0 else None

    def most_completed(self) -> int:
        """Return the most steps that any rank has completed."""
        return max(rank_entry.completed for rank_entry in self.rank_entries)

    def step_s(self) -> float:
        """Return the duration of the last step of the slowest rank."""
        return max(rank_entry.step_ns for rank_entry in self.rank_entries) / 1e9

    def skipped(self) -> set[int]:
        """Return the versions that some rank announced to skip."""
        return {rank_entry.skipped for rank_entry in self.rank_entries} - {EMPTY}

    def abandoned(self) -> set[int]:
        """Return the versions that some rank will never hold: it announced a skip, or has a newer version without this one.

        The second case matters too: only the newest skip is announced, and a rank that has another capture interval for a
        moment passes over a version without announcing it.
        """
        if self.spans_nodes:
            count = min(self._words[_ABANDONED_COUNT], MAX_ABANDONED)
            return set(self._words[_ABANDONED : _ABANDONED + count])
        held = {version for rank_entry in self.rank_entries for version in rank_entry.slots if version >= 0}
        lost = self.skipped()
        for rank_entry in self.rank_entries:
            slots = rank_entry.slots
            newest = max(*slots, rank_entry.skipped)
            lost |= {version for version in held if version < newest and version not in slots}
        return lost

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._mmap.close()


def status_page_bytes(world_size: int) -> int:
    """Return the size of a status page in bytes."""
    return _HEADER_WORDS * 8 + world_size * RANK_ENTRY_BYTES


def create_status_page(world_size: int) -> int:
    """Return the descriptor of a new memfd that holds an empty status page."""
    fd = os.memfd_create("deadpool-status_page", os.MFD_CLOEXEC)
    os.ftruncate(fd, status_page_bytes(world_size))
    status_page = StatusPage(fd, world_size)
    status_page._words[_COMMITTED] = FROM_RANK_ENTRIES  # noqa: SLF001 - same module
    for rank_entry in status_page.rank_entries:
        rank_entry.clear(keep_slots=False)
    status_page.close()
    return fd
