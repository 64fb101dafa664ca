"""Initial load: the checkpoint that a world begins from is chosen once, and loaded by every node before any rank starts."""

import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from deadpool_run.agent.checkpoint.checkpointer import Checkpointer, Checkpointers
from deadpool_run.agent.checkpoint.job import CheckpointedJob
from deadpool_run.ids import NodeId, Rank
from deadpool_run.wire import peers
from deadpool_run.wire.checkpoints import CheckpointFailed, CheckpointLoaded, ChooseCheckpoint
from deadpool_run.wire.messages import Message


@dataclass(slots=True)
class InitialLoad:
    """The load of one world. `begun` is called with the checkpoint once every node has loaded it."""

    order: ChooseCheckpoint
    job: CheckpointedJob
    checkpointers: Checkpointers
    homes: dict[Rank, NodeId]
    """The nodes of the ranks, as far as they are known."""
    begun: Callable[[CheckpointLoaded], None]
    _checkpointer: Checkpointer | None = None
    _chosen: CheckpointLoaded | None = None
    _seats: list[Callable[[], None]] = field(default_factory=list)
    _attempt: str = ""
    _waiting: set[NodeId] = field(default_factory=set)

    def choose(self) -> None:
        """Look for the newest good checkpoint."""
        self._chosen = None
        self._checkpointer = self.checkpointers.start((), self._found)
        self._checkpointer.ask(self.order)

    def seat(self, node: NodeId, rank: Rank, call: Callable[[], None]) -> None:
        """Note the rank's node, and call once every rank can be assigned."""
        self._seats.append(call)
        if self.homes.get(rank) != node:
            self.homes[rank] = node
            self._load()

    def loaded(self, node: NodeId, answer: peers.Loaded) -> None:
        """Record that a node has loaded its ranks' state, or cannot."""
        if answer.attempt != self._attempt or node not in self._waiting or self._chosen is None:
            return
        self._waiting.discard(node)
        if answer.failure:
            self._waiting.clear()
            by = "" if self.job.alone else f" by node {node}"
            self.job.print_line(f"checkpoint {self._chosen.where} is refused{by}: {answer.failure}")
            self.order.but.append(self._chosen.where)
            self.choose()
        elif not self._waiting:
            self._begin(self._chosen)

    def stop(self) -> None:
        """Load nothing more, and assign no rank."""
        self._seats.clear()
        self._waiting.clear()
        if self._checkpointer is not None:
            self._checkpointer.kill()

    def _found(self, answer: Message) -> None:
        assert self._checkpointer is not None
        self._checkpointer.let_go()
        self._checkpointer = None
        if isinstance(answer, CheckpointLoaded):
            for refusal in answer.refused:
                self.job.print_line(refusal)
            self._chosen = answer
            self._load()
        else:
            self.job.cannot_begin(answer.why if isinstance(answer, CheckpointFailed) else str(answer))

    def _load(self) -> None:
        """Have every node load its ranks' state, once the checkpoint and every rank's node are known."""
        if self._chosen is None or len(self.homes) < self.order.world_size:
            return
        if self._chosen.version < 0:
            self._begin(self._chosen)
            return
        self._attempt = uuid.uuid4().hex[:8]
        ranks: dict[NodeId, list[int]] = defaultdict(list)
        for rank, node in self.homes.items():
            ranks[node].append(rank)
        self._waiting = set(ranks)
        for node, own in ranks.items():
            self.job.tell_node(node, peers.Load(self._attempt, tuple(own), self._chosen.where, self._chosen.record))

    def _begin(self, chosen: CheckpointLoaded) -> None:
        seats, self._seats = self._seats, []
        self.begun(chosen)
        for call in seats:
            call()
