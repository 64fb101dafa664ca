"""A node's part in durable checkpoints: it copies, writes and loads its ranks' state in steps, on the leader's orders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deadpool_run.agent.checkpoint.checkpointer import Checkpointer, Checkpointers
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.checkpoint_format import NOTHING, CheckpointStep
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.vault.vault import Vault
from deadpool_run.wire import peers
from deadpool_run.wire.checkpoints import CheckpointFailed, CheckpointLoaded, FillSlots, StepTaken, TakeStep
from deadpool_run.wire.messages import Message


@dataclass(eq=False, slots=True)
class CheckpointParticipant:
    """In the running loop."""

    checkpointers: Checkpointers
    vault: Vault
    answer: Callable[[peers.Saved | peers.Loaded], None]
    """Answers the leader."""
    on_held: Callable[[Rank, Version], None]
    """Takes the version that a rank starts with here."""
    resume: Version = NOTHING
    """The version that the first slots of this node's ranks were loaded with."""
    _attempt: str = ""
    _last: bool = False
    _checkpointer: Checkpointer | None = None

    def begin(self) -> None:
        """Forget what was loaded: the world begins with a fresh vault."""
        self.void()
        self.resume = NOTHING

    def seated(self, rank: Rank) -> None:
        """Publish the loaded version of a rank that is about to be assigned."""
        if self.resume >= 0:
            self.vault.status_page.rank_entries[rank].set_slot(0, self.resume)
            self.on_held(rank, self.resume)

    # --- writing --------------------------------------------------------------------------------------------------

    def take_step(self, order: TakeStep) -> None:
        """Take one step of an attempt."""
        step, ranks = CheckpointStep(order.step), [Rank(rank) for rank in order.ranks]
        if step is CheckpointStep.PREPARE:
            self._start(order.attempt, ranks, lambda answer: self._step_taken(order.attempt, answer))
        if self._checkpointer is None or order.attempt != self._attempt:
            self.answer(peers.Saved(order.attempt, CheckpointFailed("this node has given it up", again=True)))
            return
        if step is CheckpointStep.COPY and ranks:
            # With several nodes, a rank learns of a newer committed version only after this, and has not overwritten this
            # one. On one machine a rank may have begun to overwrite it: then the copy fails, and another follows.
            self.vault.status_page.kept = order.version
        self._last = step is (CheckpointStep.COMPLETE if order.leads else CheckpointStep.PARTS)
        self._checkpointer.ask(order)

    def _step_taken(self, attempt: str, answer: Message) -> None:
        assert isinstance(answer, StepTaken | CheckpointFailed)
        if isinstance(answer, CheckpointFailed) or self._last:
            self._let_go()
        self.answer(peers.Saved(attempt, answer))

    # --- loading --------------------------------------------------------------------------------------------------

    def load(self, order: peers.Load) -> None:
        """Fill the slots of ranks that will be assigned here."""
        ranks = [Rank(rank) for rank in order.ranks]
        self.resume = NOTHING
        for rank in ranks:
            self.vault.status_page.rank_entries[rank].set_slot(0, EMPTY)
        self._start(order.attempt, ranks, lambda answer: self._loaded(order, answer))
        assert self._checkpointer is not None
        self._checkpointer.ask(FillSlots(order.where, self.vault.world_size, order.record))

    def _loaded(self, order: peers.Load, answer: Message) -> None:
        self._let_go()
        failure = answer.why if isinstance(answer, CheckpointFailed) else ""
        if isinstance(answer, CheckpointLoaded):
            self.resume = Version(answer.version)
        self.answer(peers.Loaded(order.attempt, failure))

    # --- its checkpointer -----------------------------------------------------------------------------------------

    def void(self, attempt: str | None = None) -> None:
        """End this attempt, if it is under way. None: any attempt."""
        if self._checkpointer is not None and attempt in (None, self._attempt):
            self._checkpointer.kill()
            self._checkpointer = None
            self.vault.status_page.kept = EMPTY

    def _start(self, attempt: str, ranks: Sequence[Rank], on_answer: Callable[[Message], None]) -> None:
        self.void()
        self._attempt, self._last = attempt, False
        self._checkpointer = self.checkpointers.start(ranks, on_answer)

    def _let_go(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.let_go()
            self._checkpointer = None
