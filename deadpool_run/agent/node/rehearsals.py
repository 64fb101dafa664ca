"""Transcripts for spares that rehearse ahead of need: from this node, or from the one where the rank lives."""

from collections.abc import Callable

from deadpool_run.core.effects import PrepareSpare
from deadpool_run.core.events import FetchFailed
from deadpool_run.ids import NodeId, WorkerId
from deadpool_run.vault.transfer.memory import Memory
from deadpool_run.vault.transfer.replicator import Replicator
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.peers import Peer


class Rehearsals:
    """The spares of this node that wait for a transcript."""

    def __init__(self, vault: Vault, submit: Callable[[FetchFailed], object]) -> None:
        """`submit` reports a spare that gets none, with the node that was asked."""
        self._vault = vault
        self._submit = submit
        self._waiting: dict[WorkerId, PrepareSpare] = {}

    def order(
        self, order: PrepareSpare, source: Peer | None, copies: Replicator | None, then: Callable[[int], None]
    ) -> None:
        """Call `then` with a descriptor of the rank's transcript, which it closes, unless `cancel` comes first."""

        def fetched(memory: Memory | None, failure: str | None) -> None:
            is_wanted = self._waiting.get(order.worker) is order  # else it has a rank by now, or another order
            if is_wanted:
                del self._waiting[order.worker]
            if memory is not None and is_wanted:
                then(memory.give())
            elif memory is not None:
                memory.close()
            elif is_wanted:
                source_node = order.transcript_from or NodeId("")
                self._submit(FetchFailed(order.worker, order.epoch, source_node, failure or "no transcript"))

        self._waiting[order.worker] = order
        transcript = self._vault.open_transcript(order.rank)
        if transcript is not None:
            fetched(Memory(transcript), None)
        elif source is None or copies is None:
            fetched(None, f"rank {order.rank} does not live there any more")
        else:
            copies.fetch_transcript(order.rank, source, fetched)

    def cancel(self, worker: WorkerId) -> None:
        """Forget the order of a spare that is to do something else."""
        self._waiting.pop(worker, None)
