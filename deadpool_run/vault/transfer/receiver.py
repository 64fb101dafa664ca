"""The side of a vault that peers speak to: takes copies from owners, and gives what is held to whoever needs it.

An owner says `put`, and is told to go on, that this very content is here already, or why it is not taken; behind the
segment it is told what is held now. Whoever says `get` is told the size of what follows.
"""

import contextlib
import logging
import socket
import threading
from typing import Any

from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Rank
from deadpool_run.vault.transfer import dedup, fields, framing, streams
from deadpool_run.vault.transfer.catalog import Shared, find, is_sound, similar
from deadpool_run.vault.transfer.framing import Outcome, Range
from deadpool_run.vault.transfer.replicas import TRANSCRIPT, Copy

_LOG = logging.getLogger("deadpool_run")
_TIMELINE_WAIT_S = 5.0
_CAPTURE_WAIT_S = 2.0
"""An owner waits up to this long for ranks here that are late with the same step."""


class Served:
    """One connection from a peer, on its own thread."""

    def __init__(self, sock: socket.socket, shared: Shared) -> None:
        self._sock = sock
        self._shared = shared
        self.thread = threading.Thread(target=self._run, name="deadpool-serve", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread."""
        framing.shut_down(self._sock)

    def _run(self) -> None:
        with self._sock:
            try:
                framing.prepare(self._sock)
                while not self._shared.closing.is_set():
                    message = framing.receive_frame(self._sock, idle=lambda: not self._shared.closing.is_set())
                    if message is None:
                        return
                    self._obey(message)
            except ProtocolError as error:
                _LOG.warning("closing a connection between vaults: %s", error)
            except OSError as error:
                _LOG.debug("a connection between vaults broke: %s", error)

    def _obey(self, message: dict[str, Any]) -> None:
        match message.get("do"):
            case "put":
                self._take(message)
            case "part":
                self._take_part(message)
            case "get":
                self._give(message)
            case other:
                raise ProtocolError(f"a message between vaults asks for {str(other)[:40]!r}")

    # --- put -----------------------------------------------------------------------------------------------------

    def _take(self, message: dict[str, Any]) -> None:
        replicas = self._shared.replicas
        rank, version = fields.rank(message, self._shared.vault.world_size), fields.version(message)
        token, timeline = fields.token(message.get("token")), fields.number(message, "timeline")
        nbytes, held = fields.segment_bytes(message), fields.identities(message.get("held"))
        compare, parts = bool(message.get("compare")) and version is not TRANSCRIPT, fields.parts(message)
        delivery = fields.token(message.get("delivery")) if parts > 1 else b""
        refusal = (
            "the rank lives on this node" if self._shared.vault.lives_here(rank) else replicas.refusal(rank, timeline)
        )
        if refusal is None and not replicas.has(rank, version, token, timeline):
            framing.send_frame(self._sock, {"say": "go"})
            copy = Copy(version, token, nbytes, timeline, replicas.spare(rank, version))
            refusal = self._receive(rank, copy, parts, delivery, compare=compare)
        if refusal is not None:
            framing.send_frame(self._sock, {"say": "no", "why": refusal})
            return
        left = replicas.trim(rank, timeline, held)
        transcript = replicas.transcript(rank)
        told = {"held": fields.encode(left), "transcript": None if transcript is None else transcript.hex()}
        framing.send_frame(self._sock, {"say": "held", **told})

    def _receive(self, rank: Rank, copy: Copy, parts: int, delivery: bytes, *, compare: bool) -> str | None:
        """Receive a copy and add it; return the reason if that fails."""
        whole = False
        try:
            with copy.memory.view(copy.nbytes) as view:
                found = self._search(rank, copy, view) if compare else ()
                ranges = streams.cut(dedup.rest(copy.nbytes, found), parts)
                outcome = self._receive_parts(delivery, view, ranges)
            whole = outcome is Outcome.WHOLE and is_sound(copy.memory.fd, copy.version, copy.token, copy.nbytes)
        finally:
            if not whole:
                self._shared.replicas.put_back(rank, copy.memory)
        if not whole:
            return "torn" if outcome is Outcome.TORN else "damaged"
        return self._shared.replicas.add(rank, copy)

    def _receive_parts(self, delivery: bytes, view: memoryview, parts: list[list[Range]]) -> Outcome:
        """Receive the first part here, and the others on other connections."""
        striped_receives, meter = self._shared.striped_receives, self._shared.received
        if len(parts) == 1:
            return framing.receive_segment(self._sock, view, meter, parts[0])
        striped_receive = streams.StripedReceive(view, parts)
        striped_receives.begin(delivery, striped_receive)
        try:
            return striped_receive.outcome(framing.receive_segment(self._sock, view, meter, parts[0]))
        finally:
            striped_receives.end(delivery)

    def _take_part(self, message: dict[str, Any]) -> None:
        part, of = fields.number(message, "part", least=1), fields.parts(message)
        self._shared.striped_receives.find(fields.token(message.get("delivery"))).bring(
            part, of, self._sock, self._shared.received
        )

    def _search(self, rank: Rank, copy: Copy, view: memoryview) -> set[int]:
        assert copy.version is not TRANSCRIPT
        sources = similar(self._shared, rank, copy.version, timeout_s=_CAPTURE_WAIT_S)
        with contextlib.closing(dedup.ChunkLookup(sources)) as search:
            return search.answer(self._sock, view)

    # --- get -----------------------------------------------------------------------------------------------------

    def _give(self, message: dict[str, Any]) -> None:
        rank, version = fields.rank(message, self._shared.vault.world_size), fields.version(message)
        # The requesting node may know a newer timeline: what is void there must not be sent.
        self._shared.timeline.wait_for(fields.number(message, "timeline"), _TIMELINE_WAIT_S)
        source = find(self._shared, rank, version)
        if source is None:
            what = "transcript" if version is TRANSCRIPT else f"snapshot {version}"
            framing.send_frame(self._sock, {"say": "no", "why": f"it holds no {what} of rank {rank}"})
            return
        try:
            of = streams.worthwhile(source.nbytes, fields.parts(message))
            told = {"nbytes": source.nbytes, "token": source.token.hex(), "of": of}
            framing.send_frame(self._sock, {"say": "have", **told})
            part = fields.number(message, "part", below=of)
            source.send(self._sock, self._shared, ranges=streams.cut([(0, source.nbytes)], of)[part])
        finally:
            source.close()
