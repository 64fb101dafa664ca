"""From which durable checkpoint a world of several nodes begins: chosen once, loaded by all before any rank is given away."""

import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from deadpool_run.agent.checkpoint.checkpointer import Checkpointer, Checkpointers
from deadpool_run.agent.spec import DurableSpec
from deadpool_run.ids import NodeId, Rank
from deadpool_run.wire import peers
from deadpool_run.wire.checkpoints import CheckpointFailed, CheckpointLoaded, ChooseCheckpoint
from deadpool_run.wire.messages import Message


@dataclass(slots=True)
class InitialLoad:
    """Of one world. `begun` is told from what, once every node has loaded it; `lost` why it cannot begin."""

    spec: DurableSpec
    run: str
    first: bool
    """The job begins; else its world begins again, which goes on from what it has written itself."""
    world_size: int
    checkpointers: Checkpointers
    tell: Callable[[NodeId, peers.ToNode], None]
    say: Callable[[str], None]
    begun: Callable[[CheckpointLoaded], None]
    lost: Callable[[str], None]
    _checkpointer: Checkpointer | None = None
    _but: list[str] = field(default_factory=list)
    _chosen: CheckpointLoaded | None = None
    _seats: list[tuple[NodeId, Rank, Callable[[], None]]] = field(default_factory=list)
    _attempt: str = ""
    _waiting: set[NodeId] = field(default_factory=set)

    def choose(self) -> None:
        """Begin to look for the newest that is good."""
        self._chosen = None
        self._checkpointer = self.checkpointers.start((), self._found)
        spec = self.spec
        self._checkpointer.ask(
            ChooseCheckpoint(spec.target, self.run, spec.resume, self.first, self.world_size, list(self._but))
        )

    def seat(self, node: NodeId, rank: Rank, call: Callable[[], None]) -> None:
        """Call when the rank, which will live on this node, can be given away: when all of them can."""
        self._seats.append((node, rank, call))
        self._load()

    def loaded(self, node: NodeId, told: peers.Loaded) -> None:
        """Note that a node holds what it is to, or cannot."""
        if told.attempt != self._attempt or node not in self._waiting or self._chosen is None:
            return
        self._waiting.discard(node)
        if told.failure:
            self._waiting.clear()
            self.say(f"checkpoint {self._chosen.where} is refused by node {node}: {told.failure}")
            self._but.append(self._chosen.where)
            self.choose()
        elif not self._waiting:
            self._go()

    def give_up(self) -> None:
        """Call nobody any more."""
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
                self.say(refusal)
            self._chosen = answer
            self._load()
        else:
            self.lost(answer.why if isinstance(answer, CheckpointFailed) else str(answer))

    def _load(self) -> None:
        """Have every node load its ranks' slots, once it is known what, and whose."""
        if self._chosen is None or len(self._seats) < self.world_size:
            return
        if self._chosen.version < 0:
            self._go()
            return
        self._attempt = uuid.uuid4().hex[:8]
        ranks: dict[NodeId, list[int]] = defaultdict(list)
        for node, rank, _ in self._seats:
            ranks[node].append(rank)
        self._waiting = set(ranks)
        for node, own in ranks.items():
            self.tell(node, peers.Load(self._attempt, tuple(own), self._chosen.where, self._chosen.version))

    def _go(self) -> None:
        assert self._chosen is not None
        seats, self._seats = self._seats, []
        self.begun(self._chosen)
        for _, _, call in seats:
            call()
