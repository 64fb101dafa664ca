"""The transcript: what a rank received in the control-sized collectives of set-up and of its first steps.

A replacement for the rank rehearses with these values where a fake answer would lead it astray (object sizes, pipeline
shapes, bucket orders). Slots are reserved when a collective is issued and filled when it completes: filling them at
issue time would have to wait, and waiting there deadlocks pairs of sends and receives.

Format: magic, BLAKE2b-256 of all that follows, length of the manifest (8 bytes, big-endian), the manifest (JSON), then the
tensors as raw bytes in the machine's order.
"""

import hashlib
import json
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from deadpool_run.errors import SnapshotError
from deadpool_run.vault.segments import read_blob, write_blob
from deadpool_run.worker.codec import raw_bytes

MAX_FLOAT_BYTES = 4 << 10
"""Floating-point outputs up to this size are control values (a loss, a norm); larger ones are data."""
MAX_BYTES = 64 << 20

_MAGIC = b"DPTR\x00\x02"
_LENGTH = struct.Struct(">Q")
_DIGEST_BYTES = 32

Shape = tuple[str, tuple[int, ...]]
"""A tensor's dtype and size."""


@dataclass(slots=True)
class TranscriptEntry:
    """One collective: its outputs' shapes and, where they are control-sized and it completed, their values."""

    name: str
    shapes: tuple[Shape, ...]
    values: list[torch.Tensor | None] = field(default_factory=list)
    source: int | None = None
    """The rank that a `recv_anysource` received from."""

    @property
    def is_control(self) -> bool:
        """Whether some value was kept."""
        return any(value is not None for value in self.values)


class Transcript:
    """Recorded collectives by group and order of issue; recorded into or played back from. Safe to use from any thread."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self.misses = 0
        self.hits = 0
        self.first_miss = ""
        """What was called in place of what, at the first miss."""
        self.facts: dict[str, Any] = {}
        """What the recorded steps made, as JSON values: see `rehearsal`."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._slots: dict[str, list[TranscriptEntry]] = {}
        self._next: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def overflowed(self) -> bool:
        """Whether more was received than may be kept, so that the rank cannot be rehearsed."""
        return self._bytes > self._max_bytes

    @property
    def nbytes(self) -> int:
        """The size of the recorded values."""
        return self._bytes

    @property
    def left(self) -> int:
        """How many recorded collectives were not played."""
        with self._lock:
            return sum(max(0, len(slots) - self._next.get(group, 0)) for group, slots in self._slots.items())

    def reserve(self, group: str, name: str, outputs: Sequence[torch.Tensor]) -> TranscriptEntry:
        """Take the group's next place for a collective that is being issued."""
        slot = TranscriptEntry(name, tuple(map(_shape, outputs)))
        with self._lock:
            self._slots.setdefault(group, []).append(slot)
        return slot

    def fill(self, slot: TranscriptEntry, outputs: Sequence[torch.Tensor], source: int | None = None) -> None:
        """Keep the control-sized outputs of a collective that has completed."""
        kept = [tensor for tensor in outputs if _is_control(tensor)]
        with self._lock:
            if self.overflowed:
                return
            self._bytes += sum(tensor.nbytes for tensor in kept)
            fits = self._bytes <= self._max_bytes
            if not fits:
                self._slots.clear()
                return
        slot.values = [tensor.detach().clone() if _is_control(tensor) else None for tensor in outputs]
        slot.source = source

    def play(self, group: str, name: str, outputs: Sequence[torch.Tensor]) -> TranscriptEntry | None:
        """Write the recorded values of the group's next collective into `outputs`; count a miss if it is another one.

        Outputs for which no value was kept are left alone. Data whose shape depends on values (tokens that a router
        sends) may have another shape in a rehearsal: that is no miss. Returns the slot that was played.
        """
        with self._lock:
            sequence = self._next.get(group, 0)
            self._next[group] = sequence + 1
            slots = self._slots.get(group, [])
            slot = slots[sequence] if sequence < len(slots) else None
            shapes = tuple(map(_shape, outputs))
            if slot is None or slot.name != name or (slot.shapes != shapes and slot.is_control):
                self.misses += 1
                expected = "nothing" if slot is None else f"{slot.name} of {_words(slot.shapes)}"
                self.first_miss = self.first_miss or f"{name} of {_words(shapes)} where {expected} was recorded"
                return None
            if slot.shapes != shapes:
                return None
            self.hits += 1
        for output, value in zip(outputs, slot.values, strict=False):
            if value is not None:
                output.data.copy_(value)
        return slot

    def write(self, fd: int) -> None:
        """Store the transcript in a rank's segment of the vault. Raises `SnapshotError` if it overflowed."""
        write_blob(fd, self.to_bytes())

    @classmethod
    def read(cls, fd: int) -> Self:
        """Return what the rank's last owner stored. Raises `SnapshotError` if nothing whole is there."""
        blob = read_blob(fd)
        if blob is None:
            raise SnapshotError("no complete transcript is held for this rank, so that nobody can rehearse as it")
        return cls.from_bytes(blob)

    def to_bytes(self) -> bytes:
        """Return the transcript in its stored form. Raises `SnapshotError` if it overflowed."""
        if self.overflowed:
            raise SnapshotError(
                f"set-up and the first steps received more than {self._max_bytes} bytes of control values.\n"
                "This rank cannot be rehearsed by a spare: broadcast large integer tensors after the second step."
            )
        groups: dict[str, list[dict[str, Any]]] = {}
        blobs: list[bytes] = []
        offset = 0
        with self._lock:
            for group, slots in self._slots.items():
                entries = groups[group] = []
                for slot in slots:
                    offsets: list[int | None] = []
                    for value in slot.values:
                        offsets.append(None if value is None else offset)
                        if value is not None:
                            blobs.append(raw_bytes(value))
                            offset += len(blobs[-1])
                    entries.append({"name": slot.name, "shapes": slot.shapes, "at": offsets, "source": slot.source})
        manifest = {"groups": groups, "facts": self.facts}
        head = json.dumps(manifest, separators=(",", ":")).encode()
        body = b"".join((_LENGTH.pack(len(head)), head, *blobs))
        return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the transcript that `to_bytes` stored. Raises `SnapshotError` for anything else."""
        body = memoryview(data)[len(_MAGIC) + _DIGEST_BYTES :]
        digest = bytes(data[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES])
        if not data.startswith(_MAGIC) or hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
            raise SnapshotError(
                "a stored transcript is damaged or of another version: its rank cannot be rehearsed from it"
            )
        (length,) = _LENGTH.unpack_from(body)
        values = bytearray(body[_LENGTH.size + length :])
        transcript = cls()
        try:
            manifest = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
            transcript.facts = manifest["facts"]
            for group, entries in manifest["groups"].items():
                transcript._slots[group] = [_slot(entry, values) for entry in entries]
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise SnapshotError(f"a stored transcript does not fit its own manifest: {error}") from error
        transcript._bytes = len(values)
        return transcript


def _shape(tensor: torch.Tensor) -> Shape:
    return str(tensor.dtype), tuple(tensor.shape)


def _words(shapes: Sequence[Shape]) -> str:
    return ", ".join(f"{list(sizes)} {dtype.removeprefix('torch.')}" for dtype, sizes in shapes) or "no outputs"


def _is_control(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.nbytes <= MAX_FLOAT_BYTES or not (tensor.is_floating_point() or tensor.is_complex())


def _slot(entry: dict[str, Any], values: bytearray) -> TranscriptEntry:
    shapes = tuple((str(dtype), tuple(int(size) for size in sizes)) for dtype, sizes in entry["shapes"])
    slot = TranscriptEntry(str(entry["name"]), shapes, source=entry["source"])
    for (dtype, sizes), offset in zip(shapes, entry["at"], strict=False):
        slot.values.append(None if offset is None else _tensor(dtype, sizes, values, offset))
    return slot


def _tensor(dtype_name: str, sizes: tuple[int, ...], values: bytearray, offset: int) -> torch.Tensor:
    dtype = getattr(torch, dtype_name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype_name} is no dtype")
    tensor = torch.empty(sizes, dtype=dtype)
    if not 0 <= offset <= len(values) - tensor.nbytes:
        raise ValueError(f"a value of {tensor.nbytes} bytes at {offset} of {len(values)}")
    if tensor.nbytes:
        tensor.copy_(torch.frombuffer(values, dtype=dtype, count=tensor.numel(), offset=offset).view(sizes))
    return tensor
