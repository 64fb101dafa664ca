"""What an agent and a checkpointer say to each other; how it becomes bytes is `wire.messages`'."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LendBoard:
    """Look at this status page. Comes with one descriptor."""

    world_size: int


@dataclass(frozen=True, slots=True)
class LendSlots:
    """These are a rank's slots. Comes with two descriptors."""

    rank: int


@dataclass(frozen=True, slots=True)
class ChooseCheckpoint:
    """Choose the checkpoint that the job continues from, but not one of `but`: some node could not load those.

    `resume` is "auto", "never" or a checkpoint's path. `first`: the job begins. A restarted world continues from what
    its own run has written.
    """

    target: str
    run: str
    resume: str
    first: bool
    world_size: int
    but: list[str]


@dataclass(frozen=True, slots=True)
class FillSlots:
    """Fill every lent rank's first slot from this checkpoint."""

    where: str
    version: int
    world_size: int


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Take one step (a `vault.durable.Step`) of a checkpoint that all nodes write together.

    `attempt` names this one; `firsts` has the first rank of each node that writes; `leads`: what is done once is done here.
    """

    step: str
    target: str
    run: str
    attempt: str
    version: int
    keep: int
    world_size: int
    firsts: list[int]
    leads: bool


@dataclass(frozen=True, slots=True)
class StepTaken:
    """It was. The last of them says where the checkpoint is, and how large."""

    step: str
    where: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class CheckpointLoaded:
    """The slots hold this version; -1: there is nothing to go on from. `refused` says of each newer one why not.

    `written` is when it was: ISO-8601, UTC.
    """

    version: int
    where: str
    written: str
    refused: list[str]


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """What was asked for could not be done. `again`: it may be, with a later version."""

    why: str
    again: bool = False


ToCheckpointer = LendBoard | LendSlots | ChooseCheckpoint | FillSlots | TakeStep
FromCheckpointer = CheckpointLoaded | CheckpointFailed | StepTaken
