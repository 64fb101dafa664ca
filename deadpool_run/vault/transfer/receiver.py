"""The receiving side of a vault: takes copies from owners, and gives what is held to nodes with a replacement.

`headers` lists the requests and their answers.
"""

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import assert_never

from deadpool_run.errors import NoMemoryError, ProtocolError, SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.transfer import exchange, framing, headers, streams
from deadpool_run.vault.transfer.catalog import Shared, Source, find, is_sound, similar
from deadpool_run.vault.transfer.chunks import ChunkDigests
from deadpool_run.vault.transfer.decode import IncomingPart, Others, ParityDecoder
from deadpool_run.vault.transfer.exchange import IncomingCopy
from deadpool_run.vault.transfer.framing import Outcome
from deadpool_run.vault.transfer.memory import Memory
from deadpool_run.vault.transfer.parity import Parity, ParityPart
from deadpool_run.vault.transfer.replicas import TRANSCRIPT, Copy
from deadpool_run.wire.peer_connection import PeerConnection

_LOG = logging.getLogger("deadpool_run")
_TIMELINE_WAIT_S = 5.0
_CAPTURE_WAIT_S = 2.0
"""An owner waits up to this long for ranks here that are late with the same step."""
_GROUP_WAIT_S = 2.0
"""An owner waits up to this long for other ranks of its group, and then asks again."""
_STILL_COMPUTING_S = 2.0
"""A node that asks for a snapshot which is being computed hears this often that it is."""


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
        refusal = replicas.refusal(rank, timeline)
        if refusal is None and put.version is not TRANSCRIPT and put.group:
            headers.send(self._connection, self._take_part(put, put.version))
            return
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
        left = self._trim(put)
        headers.send(self._connection, headers.HeldVersions(left, replicas.transcript(rank)))

    def _memory_for(self, put: headers.Put) -> Memory | None:
        """Return memory for a copy. Without room for one more, copies that the owner has dropped give way."""
        replicas, was_short = self._shared.replicas, self._shared.replicas.is_short(put.rank)
        while True:
            try:
                return replicas.spare(put.rank, put.version, put.nbytes)
            except NoMemoryError as error:
                if replicas.give_way(put.rank, put.timeline, put.held):
                    continue
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
                receive = IncomingCopy(view, copy.digests, sources, self._shared.received).receive
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

    def _take_part(self, put: headers.Put, version: Version) -> headers.HeldVersions | headers.No:
        """Receive a snapshot into the parity of the rank's group, and wait for those of its other ranks."""
        replicas, parities = self._shared.replicas, self._shared.replicas.parities
        refusal = parities.refusal(put.rank, put.group)
        if refusal is not None or put.home is None:
            return headers.No(refusal or "it comes from nowhere")
        self._trim(put)  # frees memory
        try:
            offered = parities.offered(put, version, put.home)
        except NoMemoryError as error:
            return headers.No(str(error), no_memory=True)
        if offered is None:
            return headers.No("the other ranks of the group send another version")
        parity, part = offered
        outcome = Outcome.TORN
        try:
            outcome = Outcome.WHOLE if part.whole else self._receive_part(put, version, parity, part)
        finally:
            parities.ended(parity, part, whole=outcome is Outcome.WHOLE, damaged=outcome is Outcome.DAMAGED)
        if outcome is not Outcome.WHOLE:
            return headers.No("torn" if outcome is Outcome.TORN else "damaged")
        if not parities.wait_until_held(parity, put.timeline, _GROUP_WAIT_S):
            return headers.No("the snapshots of other ranks of the group are missing")
        return headers.HeldVersions(self._trim(put), replicas.transcript(put.rank))

    def _trim(self, put: headers.Put) -> list[headers.Identity]:
        """Drop what the owner does not hold any more; return what is kept in the way that it wants."""
        replicas = self._shared.replicas
        copies = replicas.trim(put.rank, put.timeline, put.held)
        computable = replicas.parities.trim(put)
        return computable if put.group else copies

    def _receive_part(self, put: headers.Put, version: Version, parity: Parity, part: ParityPart) -> Outcome:
        """Ask for the chunks that the parity lacks, and add them."""
        headers.send(self._connection, headers.Go())
        with similar(self._shared, put.rank, version, timeout_s=_CAPTURE_WAIT_S) as sources:
            receive = IncomingPart(parity, part, sources, self._shared.received).receive
            striped_receive = streams.StripedReceive(receive, put.of)
            with self._shared.striped_receives.running(put.delivery, striped_receive):
                return striped_receive.outcome(receive(self._connection, 0, put.of))

    # --- get -----------------------------------------------------------------------------------------------------

    def _give(self, get: headers.Get) -> None:
        rank, version = get.rank, get.version
        # The requesting node may know a newer timeline: what is void there must not be sent.
        self._shared.timeline.wait_for(get.timeline, _TIMELINE_WAIT_S)
        try:
            source = find(self._shared, rank, version) or self._computed(rank, version, get.timeline)
        except SnapshotError as error:
            headers.send(self._connection, headers.No(str(error)))
            return
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

    def _computed(self, rank: Rank, version: Version | None, timeline: int) -> Source | None:
        """Compute the rank's snapshot from a parity, and open it; None if there is no parity of it. Raises `SnapshotError`."""
        parities = self._shared.replicas.parities
        parity = None if version is TRANSCRIPT else parities.open(rank, version)
        if parity is None or version is TRANSCRIPT:
            return None
        try:
            with contextlib.closing(Others(self._shared)) as others, ThreadPoolExecutor(1) as thread:
                try:
                    result = thread.submit(self._compute, parity, rank, timeline, others)
                    while not wait([result], _STILL_COMPUTING_S).done and not self._shared.closing.is_set():
                        headers.send(self._connection, headers.Wait())
                finally:
                    if not result.done():
                        others.shut_down()
                result.result()
        finally:
            parities.shut(parity)
        return find(self._shared, rank, version)

    def _compute(self, parity: Parity, rank: Rank, timeline: int, others: Others) -> None:
        """Compute a rank's snapshot, if no other thread has done so meanwhile, and keep it as a copy."""
        replicas, version, digests = self._shared.replicas, parity.version, parity.parts[rank].digests
        with parity.computing:
            if replicas.has(rank, version, digests.token, timeline):
                return
            memory = replicas.spare(rank, version, digests.nbytes)
            whole = False
            try:
                with memory.view(digests.nbytes) as view:
                    ParityDecoder(self._shared, parity, timeline, others).fill(rank, view)
                whole = is_sound(memory.fd, version, digests.token, digests.nbytes)
            finally:
                if not whole:
                    replicas.put_back(rank, memory)
            if not whole:
                raise SnapshotError(f"snapshot {version} of rank {rank}, computed from a parity, is damaged")
            replicas.add(rank, Copy(version, digests, timeline, memory))
