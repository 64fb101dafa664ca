"""The receiving side of a vault: takes copies from owners, and gives what is held to nodes with a replacement.

`headers` lists the requests and their answers.
"""

import logging
import threading
from typing import assert_never

from deadpool_run.errors import NoMemoryError, ProtocolError
from deadpool_run.vault.transfer import exchange, framing, headers, streams
from deadpool_run.vault.transfer.catalog import Shared, find, is_sound, similar
from deadpool_run.vault.transfer.chunks import ChunkDigests
from deadpool_run.vault.transfer.exchange import Incoming
from deadpool_run.vault.transfer.framing import Outcome
from deadpool_run.vault.transfer.replicas import TRANSCRIPT, Copy, Memory
from deadpool_run.wire.peer_connection import PeerConnection

_LOG = logging.getLogger("deadpool_run")
_TIMELINE_WAIT_S = 5.0
_CAPTURE_WAIT_S = 2.0
"""An owner waits up to this long for ranks here that are late with the same step."""


class Served:
    """One connection from a peer, on its own thread."""

    def __init__(self, connection: PeerConnection, shared: Shared) -> None:
        self._connection = connection
        self._shared = shared
        self.thread = threading.Thread(target=self._run, name="deadpool-serve", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread."""
        framing.shut_down(self._connection.sock)

    def _run(self) -> None:
        with self._connection:
            try:
                framing.prepare(self._connection.sock)
                while not self._shared.closing.is_set():
                    request = headers.receive_request(
                        self._connection, self._shared.vault.world_size, idle=lambda: not self._shared.closing.is_set()
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
                self._shared.striped_receives.find(request.delivery).bring(request.part, request.of, self._connection)
            case headers.Get():
                self._give(request)
            case _:
                assert_never(request)

    # --- put -----------------------------------------------------------------------------------------------------

    def _take(self, put: headers.Put) -> None:
        replicas, rank, timeline = self._shared.replicas, put.rank, put.timeline
        refusal = (
            "the rank lives on this node" if self._shared.vault.lives_here(rank) else replicas.refusal(rank, timeline)
        )
        if refusal is None and not replicas.has(rank, put.version, put.token, timeline):
            memory = self._memory_for(put)
            if memory is None:
                headers.send(self._connection, headers.No("there is no memory for it", no_memory=True))
                return
            digests = ChunkDigests(self._shared.hasher, rank, put.version, put.token, put.nbytes)
            refusal = self._receive(put, Copy(put.version, digests, timeline, memory))
        if refusal is not None:
            headers.send(self._connection, headers.No(refusal))
            return
        left = replicas.trim(rank, timeline, put.held)
        headers.send(self._connection, headers.HeldVersions(left, replicas.transcript(rank)))

    def _memory_for(self, put: headers.Put) -> Memory | None:
        """Return memory for a copy. Without room for one more, copies that the owner has dropped go first, but never all."""
        replicas, was_short = self._shared.replicas, self._shared.replicas.is_short(put.rank)
        try:
            return replicas.spare(put.rank, put.version, put.nbytes)
        except NoMemoryError:
            if replicas.has_some(put.rank, put.held):
                replicas.trim(put.rank, put.timeline, put.held)
        try:
            return replicas.spare(put.rank, put.version, put.nbytes)
        except NoMemoryError as error:
            if not was_short:
                _LOG.warning("%s. Until there is more, or another node takes it, a loss repeats more steps", error)
            return None

    def _receive(self, put: headers.Put, copy: Copy) -> str | None:
        """Ask for a copy, receive and add it; return the reason if that fails."""
        rank, version, whole = put.rank, put.version, False
        try:
            headers.send(self._connection, headers.Go())
            with (
                similar(self._shared, rank, version, timeout_s=_CAPTURE_WAIT_S) as sources,
                copy.memory.view(put.nbytes) as view,
            ):
                receive = Incoming(view, copy.digests, sources, self._shared.received).receive
                striped_receive = streams.StripedReceive(receive, put.of)
                with self._shared.striped_receives.running(put.delivery, striped_receive):
                    outcome = striped_receive.outcome(receive(self._connection, 0, put.of))
            whole = outcome is Outcome.WHOLE and is_sound(copy.memory.fd, version, put.token, put.nbytes)
        finally:
            if not whole:
                self._shared.replicas.put_back(rank, copy.memory)
        if not whole:
            return "torn" if outcome is Outcome.TORN else "damaged"
        return self._shared.replicas.add(rank, copy)

    # --- get -----------------------------------------------------------------------------------------------------

    def _give(self, get: headers.Get) -> None:
        rank, version = get.rank, get.version
        # The requesting node may know a newer timeline: what is void there must not be sent.
        self._shared.timeline.wait_for(get.timeline, _TIMELINE_WAIT_S)
        source = find(self._shared, rank, version)
        if source is None:
            what = "transcript" if version is TRANSCRIPT else f"snapshot {version}"
            headers.send(self._connection, headers.No(f"it holds no {what} of rank {rank}"))
            return
        try:
            of = streams.worthwhile(source.nbytes, get.of)
            if get.part >= of:
                raise ProtocolError(f"part {get.part} is asked for, and there are {of}")
            headers.send(self._connection, headers.Have(source.nbytes, source.token, of))
            blocks = range(get.part, source.digests.blocks, of)
            outcome = exchange.send_part(self._connection, source, self._shared, blocks, source.still)
            exchange.end_part(self._connection, source.digests, get.part, of, outcome)
        finally:
            source.close()
