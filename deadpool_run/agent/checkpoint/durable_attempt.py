"""One durable checkpoint that several nodes write: which step they are at, and who has not taken it. No I/O."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault.checkpoint_format import NOTHING, CheckpointStep
from deadpool_run.wire import peers

_STEPS = tuple(CheckpointStep)


@dataclass(slots=True)
class Attempt:
    """`ranks` has every rank by its node; `leader` may have none."""

    name: str
    ranks: Mapping[NodeId, tuple[Rank, ...]]
    leader: NodeId
    target: str
    keep: int
    version: Version = NOTHING
    """Chosen when all are prepared to copy it."""
    step: CheckpointStep = CheckpointStep.PREPARE
    nbytes: int = 0
    where: str = ""
    waiting: set[NodeId] = field(default_factory=set)

    @property
    def nodes(self) -> set[NodeId]:
        """Everyone who has a part in it."""
        return {*self.ranks, self.leader}

    def orders(self) -> Iterator[tuple[NodeId, peers.Save]]:
        """Yield what each node is to do in this step, and wait for it."""
        firsts = tuple(sorted(min(ranks) for ranks in self.ranks.values()))
        takes_part: set[NodeId] = set(self.ranks)
        if self.step in (CheckpointStep.PREPARE, CheckpointStep.COPY):
            takes_part.add(self.leader)
        elif self.step is CheckpointStep.COMPLETE:
            takes_part = {self.leader}
        self.waiting = takes_part
        for node in sorted(takes_part):
            yield (
                node,
                peers.Save(
                    attempt=self.name,
                    step=self.step,
                    ranks=self.ranks.get(node, ()),
                    firsts=firsts,
                    target=self.target,
                    version=self.version,
                    keep=self.keep,
                    leads=node == self.leader,
                ),
            )

    def taken(self, node: NodeId, told: peers.Saved) -> bool:
        """Note that a node has taken its step; tell whether all have."""
        if told.step == self.step and node in self.waiting:
            self.waiting.discard(node)
            self.nbytes += told.nbytes
            self.where = told.where or self.where
            return not self.waiting
        return False

    def next_step(self) -> bool:
        """Go on to the next step; False if that was the last."""
        at = _STEPS.index(self.step) + 1
        if at == len(_STEPS):
            return False
        self.step = _STEPS[at]
        return True
