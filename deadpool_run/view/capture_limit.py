"""The cause of rarer snapshots than requested: memory, the capture, the hashing or the link, by measured times. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from deadpool_run.view.health import Status, without_copies, without_memory

_MS_PER_S = 1e3


class LimitedBy(StrEnum):
    """The longest wait of a snapshot."""

    MEMORY = "memory"
    """There is no memory for snapshots of some rank, or for copies of it."""
    CAPTURE = "capture"
    """Workers copy their tensors into memory that outlives them."""
    HASHING = "hashing"
    """The rank's node computes the digests that show which bytes another node has already."""
    LINK = "link"
    """The copy is sent to another node, and checked there."""


_WORDS: Mapping[str, str] = {
    LimitedBy.CAPTURE: "capturing",
    LimitedBy.HASHING: "hashing",
    LimitedBy.LINK: "copying to other nodes",
}


def limit(status: Status) -> dict[str, Any] | None:
    """Return what limits the interval between snapshots, and the times of the slowest rank and the slowest node.

    None if snapshots are as frequent as requested. `hash_ms` is a part of `copy_ms`; both are 0 on one node. The last of
    the three ways is the longest that a version needs until it is safe, because the next one waits for a free slot.
    """
    capture_ms = max((rank.get("capture_ms") or 0.0 for rank in status.get("ranks", ())), default=0.0)
    copies = [node.get("copies") or {} for node in status.get("nodes", ())]
    slowest = max(copies, key=lambda each: each.get("copied_s", 0.0), default={})
    copy_ms, hash_ms = (_MS_PER_S * slowest.get(name, 0.0) for name in ("copied_s", "hashed_s"))
    if without_memory(status) or without_copies(status):
        by = LimitedBy.MEMORY
    elif status.get("capture_interval", 1) <= status.get("run", {}).get("capture_interval", 1):
        return None
    elif capture_ms >= copy_ms:
        by = LimitedBy.CAPTURE
    else:
        by = LimitedBy.HASHING if hash_ms > copy_ms / 2 else LimitedBy.LINK
    return {"by": by.value, "capture_ms": capture_ms, "copy_ms": copy_ms, "hash_ms": hash_ms}


def words(status: Status) -> str:
    """Return what limits the interval, in words; empty if nothing does, or memory, which is shown elsewhere."""
    found = status.get("capture_limit") or {}
    if found.get("by") not in _WORDS:
        return ""
    times = [f"capture {found['capture_ms']:.0f} ms"]
    if found["copy_ms"]:
        times += [f"copy {found['copy_ms']:.0f} ms", f"{found['hash_ms']:.0f} ms of it hashing"]
    return f"the snapshot interval is limited by {_WORDS[found['by']]}: {', '.join(times)}"
