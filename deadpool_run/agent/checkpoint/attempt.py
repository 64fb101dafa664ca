"""An attempt at a durable checkpoint: its present step, and the nodes that have not finished it. No I/O."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault.checkpoint_format import NOTHING, CheckpointStep
from deadpool_run.wire.checkpoints import StepTaken, TakeStep

_STEPS = tuple(CheckpointStep)


@dataclass(slots=True)
class Attempt:
    """One attempt. `ranks` has every rank by its node; the leader may have none."""

    name: str
    ranks: Mapping[NodeId, tuple[Rank, ...]]
    leader: NodeId
    run: str
    target: str
    keep: int
    version: Version = NOTHING
    """Chosen when every node is prepared to copy it."""
    step: CheckpointStep = CheckpointStep.PREPARE
    nbytes: int = 0
    where: str = ""
    waiting: set[NodeId] = field(default_factory=set)

    @property
    def nodes(self) -> set[NodeId]:
        """The nodes that take part."""
        return {*self.ranks, self.leader}

    def orders(self) -> Iterator[tuple[NodeId, TakeStep]]:
        """Yield each node's order for this step, and wait for its answer."""
        firsts = tuple(sorted(min(ranks) for ranks in self.ranks.values()))
        match self.step:
            case CheckpointStep.PREPARE | CheckpointStep.COPY:
                self.waiting = self.nodes
            case CheckpointStep.COMPLETE:
                self.waiting = {self.leader}
            case _:
                self.waiting = set(self.ranks)
        for node in sorted(self.waiting):
            order = TakeStep(
                step=self.step,
                target=self.target,
                run=self.run,
                attempt=self.name,
                version=self.version,
                keep=self.keep,
                world_size=sum(map(len, self.ranks.values())),
                firsts=firsts,
                leads=node == self.leader,
                ranks=self.ranks.get(node, ()),
            )
            yield node, order

    def taken(self, node: NodeId, taken: StepTaken) -> bool:
        """Record that a node has finished the step; return whether all have."""
        if taken.step == self.step and node in self.waiting:
            self.waiting.discard(node)
            self.nbytes += taken.nbytes
            self.where = taken.where or self.where
            return not self.waiting
        return False

    def next_step(self) -> bool:
        """Advance to the next step; return False if that was the last."""
        at = _STEPS.index(self.step) + 1
        if at == len(_STEPS):
            return False
        self.step = _STEPS[at]
        return True
