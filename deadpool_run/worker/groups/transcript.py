"""The transcript: the small values that a rank received in the collectives of set-up and its first steps.

A replacement rehearses with these values where a fake result would make it fail (object sizes, pipeline shapes, bucket
orders). An entry is reserved when a collective is issued and filled when it completes: filling it at issue time would have
to wait, and waiting there deadlocks pairs of sends and receives.

Format: magic, BLAKE2b-256 of all that follows, length of the manifest (8 bytes, big-endian), the manifest (JSON), then the
tensors as raw bytes in native byte order.
"""

import hashlib
import json
import struct
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any, Self

import msgspec
import torch

from deadpool_run.errors import SnapshotError
from deadpool_run.vault.segments import read_blob
from deadpool_run.wire import typed
from deadpool_run.worker.codec import raw_bytes

MAX_FLOAT_BYTES = 4 << 10
"""Floating-point outputs up to this size are control values (a loss, a norm); larger ones are data."""
MAX_BYTES = 64 << 20

_MAGIC = b"DPTR\x00\x02"
_LENGTH = struct.Struct(">Q")
_DIGEST_BYTES = 32

Shape = tuple[str, tuple[int, ...]]
"""A tensor's dtype and size."""


class TranscriptEntry(msgspec.Struct):
    """One collective: its outputs' shapes, and their values if they are control values and it completed."""

    name: str
    shapes: tuple[Shape, ...]
    values: list[Any] = msgspec.field(name="at", default_factory=list)
    """One tensor per output, None if it was not kept. In the manifest: the position of its bytes."""
    source: int | None = None
    """The rank that a `recv_anysource` received from."""


class Transcript:
    """Collectives by group, in the order of issue, to record or to play back. Thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        """The size of the recorded values."""
        self.misses = 0
        self.first_miss = ""
        """The first collective that differed from the recording."""
        self.facts: dict[str, Any] = {}
        """The objects that the recorded steps created, as JSON values: see `rehearsal`."""
        self._entries: dict[str, list[TranscriptEntry]] = {}
        self._next: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def overflowed(self) -> bool:
        """Whether the values exceeded `MAX_BYTES`, so that the rank cannot be rehearsed."""
        return self.nbytes > MAX_BYTES

    @property
    def left(self) -> int:
        """The number of recorded collectives that were not played."""
        with self._lock:
            return sum(max(0, len(entries) - self._next.get(group, 0)) for group, entries in self._entries.items())

    def reserve(self, group: str, name: str, outputs: Sequence[torch.Tensor]) -> TranscriptEntry:
        """Append an entry for a collective that is being issued."""
        entry = TranscriptEntry(name, tuple(map(_shape, outputs)))
        with self._lock:
            self._entries.setdefault(group, []).append(entry)
        return entry

    def fill(self, entry: TranscriptEntry, outputs: Sequence[torch.Tensor], source: int | None = None) -> None:
        """Keep the control values of a completed collective."""
        with self._lock:
            if self.overflowed:
                return
            self.nbytes += sum(tensor.nbytes for tensor in outputs if _is_control(tensor))
            if self.nbytes > MAX_BYTES:
                self._entries.clear()
                return
        entry.values = [tensor.detach().clone() if _is_control(tensor) else None for tensor in outputs]
        entry.source = source

    def play(self, group: str, name: str, outputs: Sequence[torch.Tensor]) -> TranscriptEntry | None:
        """Write the values of the group's next recorded collective into `outputs`; count a miss if that differs.

        Outputs without a kept value are not changed. The shape of data may depend on values (tokens that a router sends)
        and differ in a rehearsal: that is not a miss. Returns the entry that was played.
        """
        with self._lock:
            sequence = self._next.get(group, 0)
            self._next[group] = sequence + 1
            entries = self._entries.get(group, [])
            entry = entries[sequence] if sequence < len(entries) else None
            shapes = tuple(map(_shape, outputs))
            if (
                entry is None
                or entry.name != name
                or (entry.shapes != shapes and any(value is not None for value in entry.values))
            ):
                self.misses += 1
                expected = "nothing" if entry is None else f"{entry.name} of {_words(entry.shapes)}"
                self.first_miss = self.first_miss or f"{name} of {_words(shapes)} where {expected} was recorded"
                return None
            if entry.shapes != shapes:
                return None
        for output, value in zip(outputs, entry.values, strict=False):
            if value is not None:
                output.data.copy_(value)
        return entry

    @classmethod
    def read(cls, fd: int) -> Self:
        """Return the stored transcript. Raises `SnapshotError` if there is no complete one."""
        blob = read_blob(fd)
        if blob is None:
            raise SnapshotError("there is no complete transcript of this rank, so that a replacement cannot rehearse")
        return cls.from_bytes(blob)

    def to_bytes(self) -> bytes:
        """Return the transcript in its stored form. Raises `SnapshotError` if it overflowed."""
        if self.overflowed:
            raise SnapshotError(
                f"set-up and the first steps received more than {MAX_BYTES} bytes of control values, so that no spare can "
                "rehearse this rank.\nBroadcast large integer tensors after the second step."
            )
        values = bytearray()

        def place(value: torch.Tensor) -> int:
            values.extend(raw_bytes(value))
            return len(values) - value.nbytes

        with self._lock:
            head = typed.to_json({"groups": msgspec.to_builtins(self._entries, enc_hook=place), "facts": self.facts})
        body = b"".join((_LENGTH.pack(len(head)), head, values))
        return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the transcript of `to_bytes`. Raises `SnapshotError` if it is damaged or of another version."""
        body = memoryview(data)[len(_MAGIC) + _DIGEST_BYTES :]
        digest = bytes(data[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES])
        if not data.startswith(_MAGIC) or hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
            raise SnapshotError(
                "a stored transcript is damaged or of another version, so that its rank cannot be rehearsed"
            )
        (length,) = _LENGTH.unpack_from(body)
        values = bytearray(body[_LENGTH.size + length :])
        transcript = cls()
        try:
            manifest = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
            transcript.facts = manifest["facts"]
            transcript._entries = msgspec.convert(manifest["groups"], dict[str, list[TranscriptEntry]])
            for entry in chain.from_iterable(transcript._entries.values()):
                entry.values = [
                    None if at is None else _tensor(*shape, values, at)
                    for shape, at in zip(entry.shapes, entry.values, strict=False)
                ]
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise SnapshotError(f"a stored transcript does not fit its own manifest: {error}") from error
        transcript.nbytes = len(values)
        return transcript


def _shape(tensor: torch.Tensor) -> Shape:
    return str(tensor.dtype), tuple(tensor.shape)


def _words(shapes: Sequence[Shape]) -> str:
    return ", ".join(f"{list(sizes)} {dtype.removeprefix('torch.')}" for dtype, sizes in shapes) or "no outputs"


def _is_control(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.nbytes <= MAX_FLOAT_BYTES or not (tensor.is_floating_point() or tensor.is_complex())


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
