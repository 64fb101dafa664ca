"""The transcript: the values that a rank received in the collectives of set-up, and the small ones of its first steps.

A replacement rehearses with these values where a fake result would make it fail (object sizes, pipeline shapes, bucket
orders) or give it other data than its rank had (statistics that all ranks sum, the weights of a teacher). An entry is reserved
when a collective is issued and filled when it completes: filling it at issue time would have to wait, and waiting there deadlocks
pairs of sends and receives. Collectives of the script's own threads are entries of their own. Any number of them may be missing,
because the recording ends at some point of their work.

Format: magic, BLAKE2b-256 of all that follows, then a MessagePack map in which a tensor is its bytes in native byte order.
"""

import hashlib
import json
import math
import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Self

import msgspec
import torch

from deadpool_run.errors import PeerLostError, SnapshotError
from deadpool_run.text import size
from deadpool_run.vault.segments import read_blob
from deadpool_run.wire import typed
from deadpool_run.worker.codec import raw_bytes
from deadpool_run.worker.process import script_threads
from deadpool_run.worker.transcript.setup_outputs import Origin, Output, SetupOutputs, storage_of

MAX_FLOAT_BYTES = 4 << 10
"""Floating-point outputs up to this size are control values (a loss, a norm); larger ones are data, which is kept of set-up only."""
MAX_BYTES = 64 << 20

_OWN = "@threads"
"""Follows a group's name in the entries of the script's own threads."""
_NOT_RECORDED = (
    "{what}: the rehearsal of a replacement has no result for this collective of a thread: the first process of the rank had not received "
    "it when the first two steps ended.\nDiscard what the thread was doing, and do not repeat it on this rank alone."
)
_MAGIC = b"DPTR\x00\x03"
_DIGEST_BYTES = 32
_DTYPES = {
    name: value for value in vars(torch).values() if isinstance(value, torch.dtype) and (name := str(value))[6] != "q"
}
"""By name. A tensor of a quantized dtype that was made without a quantizer crashes the process."""

Shape = tuple[str, tuple[int, ...]]
"""A tensor's dtype and size."""


class TranscriptEntry(msgspec.Struct):
    """One collective: its outputs' shapes, and their values if they are kept and it completed."""

    name: str
    shapes: tuple[Shape, ...]
    values: list[Any] = msgspec.field(default_factory=list)
    """One tensor per output, None if it was not kept. In the stored form: its bytes."""
    source: int | None = None
    """The rank that a `recv_anysource` received from."""


class _Stored(msgspec.Struct):
    entries: dict[str, list[TranscriptEntry]]
    facts: bytes
    """JSON: a name may have lone surrogates, which MessagePack has not."""


class Transcript:
    """Collectives by group, in the order of issue, to record or to play back. Thread-safe."""

    def __init__(self, *, of_setup: bool = False) -> None:
        """`of_setup`: large outputs are kept until `end_setup`, too."""
        self.nbytes = 0
        """The size of the recorded values."""
        self.misses = 0
        self.first_miss = ""
        """The first collective that differed from the recording."""
        self.facts: dict[str, Any] = {}
        """The objects that the recorded steps created, as JSON values: see `rehearsal`."""
        self._entries: dict[str, list[TranscriptEntry]] = {}
        self._next: dict[str, int] = {}
        self._setup = SetupOutputs() if of_setup else None
        self._lock = threading.Lock()

    @property
    def overflowed(self) -> bool:
        """Whether the values exceeded `MAX_BYTES`, so that the rank cannot be rehearsed."""
        return self.nbytes > MAX_BYTES

    @property
    def left(self) -> int:
        """The number of recorded collectives that were not played."""
        with self._lock:
            steps = [(group, entries) for group, entries in self._entries.items() if not group.endswith(_OWN)]
            return sum(max(0, len(entries) - self._next.get(group, 0)) for group, entries in steps)

    def reserve(self, group: str, name: str, outputs: Sequence[torch.Tensor]) -> TranscriptEntry:
        """Append an entry for a collective that is being issued."""
        entry = TranscriptEntry(name, tuple(map(_shape, outputs)))
        with self._lock:
            self._entries.setdefault(_stream(group), []).append(entry)
            if self._setup is not None and any(map(_is_large, outputs)):
                self._setup.expect(entry)
        return entry

    def fill(self, entry: TranscriptEntry, outputs: Sequence[torch.Tensor], source: int | None = None) -> None:
        """Keep the control values of a completed collective, and hold large values of set-up."""
        with self._lock:
            if self.overflowed:
                return
            self.nbytes += sum(tensor.nbytes for tensor in outputs if _is_control(tensor))
            if self.nbytes > MAX_BYTES:
                self._entries.clear()
                return
        entry.values = [tensor.detach().clone() if _is_control(tensor) else None for tensor in outputs]
        entry.source = source
        setup = self._setup
        if setup is not None:
            with self._lock:
                if (caller := setup.completed(entry)) is not None:
                    self._hold(setup, entry, outputs, is_scripts=caller is Origin.SCRIPT)

    def _hold(
        self, setup: SetupOutputs, entry: TranscriptEntry, outputs: Sequence[torch.Tensor], *, is_scripts: bool
    ) -> None:
        for index, tensor in enumerate(outputs):
            if not _is_large(tensor):
                continue
            words = f"{entry.name} of {_words([_shape(tensor)])}"
            output = Output(entry.values, index, words, tensor.nbytes, is_scripts, storage_of(tensor))
            if not setup.ended:
                setup.hold(output, tensor)
            elif not setup.is_protected(output):  # issued in set-up, and waited for in the loop
                self.nbytes += output.nbytes
                output.value = tensor.detach().clone()
                output.keep()

    def end_setup(self, protected: Iterable[torch.Tensor]) -> list[str]:
        """Keep the large values of set-up, except those in the memory of `protected` tensors.

        Returns the script's collectives whose values have no room.
        """
        if self._setup is None:
            return []
        with self._lock:
            kept, lost = self._setup.end(protected, MAX_BYTES - self.nbytes)
            self.nbytes += sum(output.nbytes for output in kept)
            for output in kept:
                output.keep()
        return [f"{output.words} ({size(output.nbytes)})" for output in lost]

    def play(self, group: str, name: str, outputs: Sequence[torch.Tensor]) -> TranscriptEntry | None:
        """Write the values of the group's next recorded collective into `outputs`; count a miss if that differs.

        Outputs without a kept value are not changed. The shape of data may depend on values (tokens that a router sends)
        and differ in a rehearsal: that is not a miss. Returns the entry that was played. Raises `PeerLostError` for a miss in a
        thread of the script.
        """
        stream = _stream(group)
        is_own = stream != group
        with self._lock:
            sequence = self._next.get(stream, 0)
            self._next[stream] = sequence + 1
            entries = self._entries.get(stream, [])
            entry = entries[sequence] if sequence < len(entries) else None
            shapes = tuple(map(_shape, outputs))
            if (
                entry is None
                or entry.name != name
                or (entry.shapes != shapes and any(value is not None for value in entry.values))
                or (is_own and len(entry.values) < len(shapes))
            ):
                if is_own:
                    raise PeerLostError(_NOT_RECORDED.format(what=name))
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
                f"set-up and the first steps received more than {MAX_BYTES >> 20} MiB in collectives, so that no spare can rehearse "
                "this rank\nread such data from a file on each rank"
            )
        with self._lock:
            body = msgspec.msgpack.encode(_Stored(self._entries, typed.to_json(self.facts)), enc_hook=raw_bytes)
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
        transcript = cls()
        try:
            stored = msgspec.msgpack.decode(body, type=_Stored)
            facts = msgspec.convert(json.loads(stored.facts), dict[str, Any])
            transcript.facts, transcript._entries = facts, stored.entries
            for entry in chain.from_iterable(stored.entries.values()):
                transcript.nbytes += sum(len(value) for value in entry.values if value is not None)
                entry.values = [
                    None if value is None else _tensor(*shape, value)
                    for shape, value in zip(entry.shapes, entry.values, strict=False)
                ]
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise SnapshotError(f"a stored transcript is malformed: {error}") from error
        return transcript


def _stream(group: str) -> str:
    return f"{group}{_OWN}" if script_threads.is_scripts() else group


def _shape(tensor: torch.Tensor) -> Shape:
    return str(tensor.dtype), tuple(tensor.shape)


def _words(shapes: Sequence[Shape]) -> str:
    return ", ".join(f"{list(sizes)} {dtype.removeprefix('torch.')}" for dtype, sizes in shapes) or "no outputs"


def _is_control(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.nbytes <= MAX_FLOAT_BYTES or not (tensor.is_floating_point() or tensor.is_complex())


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not _is_control(tensor)


def _tensor(dtype_name: str, sizes: tuple[int, ...], value: bytes) -> torch.Tensor:
    dtype = _DTYPES[dtype_name]
    if any(not 0 <= size <= MAX_BYTES for size in sizes) or math.prod(sizes) * dtype.itemsize != len(value):
        raise ValueError(f"{len(value)} bytes for {list(sizes)} {dtype_name}")  # before torch takes memory for it
    tensor = torch.empty(sizes, dtype=dtype)
    if value:
        tensor.copy_(torch.frombuffer(bytearray(value), dtype=dtype).view(sizes))
    return tensor
