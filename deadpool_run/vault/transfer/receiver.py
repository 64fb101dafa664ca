"""The receiving side of a vault: takes copies from owners, and gives what is held to nodes with a replacement.

`headers` lists the requests and their answers.
"""

import contextlib
import logging
import socket
import threading
from typing import assert_never

from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Rank
from deadpool_run.vault.transfer import dedup, framing, headers, streams
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
                    request = headers.receive_request(
                        self._sock, self._shared.vault.world_size, idle=lambda: not self._shared.closing.is_set()
                    )
                    if request is None:
                        return
                    self._obey(request)
            except ProtocolError as error:
                _LOG.warning("closing a connection between vaults: %s", error)
            except OSError as error:
                _LOG.debug("a connection between vaults broke: %s", error)

    def _obey(self, request: headers.Request) -> None:
        match request:
            case headers.Put():
                self._take(request)
            case headers.PartHeader():
                striped_receive = self._shared.striped_receives.find(request.delivery)
                striped_receive.bring(request.part, request.of, self._sock, self._shared.received)
            case headers.Get():
                self._give(request)
            case _:
                assert_never(request)

    # --- put -----------------------------------------------------------------------------------------------------

    def _take(self, put: headers.Put) -> None:
        replicas, rank, timeline = self._shared.replicas, put.rank, put.timeline
        if put.of > 1 and put.delivery is None:
            raise ProtocolError("a delivery in several parts has no token")
        refusal = (
            "the rank lives on this node" if self._shared.vault.lives_here(rank) else replicas.refusal(rank, timeline)
        )
        if refusal is None and not replicas.has(rank, put.version, put.token, timeline):
            headers.send(self._sock, headers.Go())
            copy = Copy(put.version, put.token, put.nbytes, timeline, replicas.spare(rank, put.version))
            refusal = self._receive(put, copy)
        if refusal is not None:
            headers.send(self._sock, headers.No(refusal))
            return
        left = replicas.trim(rank, timeline, put.held)
        headers.send(self._sock, headers.HeldVersions(left, replicas.transcript(rank)))

    def _receive(self, put: headers.Put, copy: Copy) -> str | None:
        """Receive a copy and add it; return the reason if that fails."""
        rank, whole = put.rank, False
        try:
            with copy.memory.view(copy.nbytes) as view:
                found = self._search(rank, copy, view) if put.compare and copy.version is not TRANSCRIPT else ()
                ranges = streams.cut(dedup.rest(copy.nbytes, found), put.of)
                outcome = self._receive_parts(put.delivery, view, ranges)
            whole = outcome is Outcome.WHOLE and is_sound(copy.memory.fd, copy.version, copy.token, copy.nbytes)
        finally:
            if not whole:
                self._shared.replicas.put_back(rank, copy.memory)
        if not whole:
            return "torn" if outcome is Outcome.TORN else "damaged"
        return self._shared.replicas.add(rank, copy)

    def _receive_parts(self, delivery: bytes | None, view: memoryview, parts: list[list[Range]]) -> Outcome:
        """Receive the first part here, and the others on other connections."""
        striped_receives, meter = self._shared.striped_receives, self._shared.received
        if delivery is None or len(parts) == 1:
            return framing.receive_segment(self._sock, view, meter, parts[0])
        striped_receive = streams.StripedReceive(view, parts)
        striped_receives.begin(delivery, striped_receive)
        try:
            return striped_receive.outcome(framing.receive_segment(self._sock, view, meter, parts[0]))
        finally:
            striped_receives.end(delivery)

    def _search(self, rank: Rank, copy: Copy, view: memoryview) -> set[int]:
        assert copy.version is not TRANSCRIPT
        sources = similar(self._shared, rank, copy.version, timeout_s=_CAPTURE_WAIT_S)
        with contextlib.closing(dedup.ChunkLookup(sources)) as search:
            return search.answer(self._sock, view)

    # --- get -----------------------------------------------------------------------------------------------------

    def _give(self, get: headers.Get) -> None:
        rank, version = get.rank, get.version
        # The requesting node may know a newer timeline: what is void there must not be sent.
        self._shared.timeline.wait_for(get.timeline, _TIMELINE_WAIT_S)
        source = find(self._shared, rank, version)
        if source is None:
            what = "transcript" if version is TRANSCRIPT else f"snapshot {version}"
            headers.send(self._sock, headers.No(f"it holds no {what} of rank {rank}"))
            return
        try:
            of = streams.worthwhile(source.nbytes, get.of)
            if get.part >= of:
                raise ProtocolError(f"part {get.part} is asked for, and there are {of}")
            headers.send(self._sock, headers.Have(source.nbytes, source.token, of))
            source.send(self._sock, self._shared, ranges=streams.cut([(0, source.nbytes)], of)[get.part])
        finally:
            source.close()
