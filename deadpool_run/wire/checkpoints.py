"""What an agent and a checkpointer say to each other; how it becomes bytes is `wire.messages`'."""

from deadpool_run.structs import Tagged


class LendBoard(Tagged):
    """Look at this status page. Comes with one descriptor."""

    world_size: int


class LendSlots(Tagged):
    """These are a rank's slots. Comes with two descriptors."""

    rank: int


class WriteCheckpoint(Tagged):
    """Write the newest committed version, if it is above this one; keep that many of the newest checkpoints."""

    target: str
    run: str
    above: int
    keep: int


class LoadCheckpoint(Tagged):
    """Fill every lent rank's first slot from a checkpoint.

    `resume` is "auto", "never" or a checkpoint's path; `first`: the job begins, else its world begins again, which goes
    on from what it has written itself.
    """

    target: str
    run: str
    resume: str
    first: bool
    world_size: int


class ChooseCheckpoint(Tagged):
    """Say from which checkpoint the job is to go on, but for these: some node could not load them. Else as `LoadCheckpoint`."""

    target: str
    run: str
    resume: str
    first: bool
    world_size: int
    but: list[str]


class FillSlots(Tagged):
    """Fill every lent rank's first slot from this checkpoint."""

    where: str
    version: int
    world_size: int


class TakeStep(Tagged):
    """Take one step (a `vault.durable.Step`) of a checkpoint that several nodes write together.

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


class StepTaken(Tagged):
    """It was. The last of them says where the checkpoint is, and how large."""

    step: str
    where: str
    nbytes: int


class CheckpointWritten(Tagged):
    """A checkpoint is complete; `version` is -1 if there was nothing new to write."""

    version: int
    where: str
    nbytes: int


class CheckpointLoaded(Tagged):
    """The slots hold this version; -1: there is nothing to go on from. `refused` says of each newer one why not.

    `written` is when it was: ISO-8601, UTC.
    """

    version: int
    where: str
    written: str
    refused: list[str]


class CheckpointFailed(Tagged):
    """What was asked for could not be done. `again`: it may be, with a later version."""

    why: str
    again: bool = False


ToCheckpointer = LendBoard | LendSlots | WriteCheckpoint | LoadCheckpoint | ChooseCheckpoint | FillSlots | TakeStep
FromCheckpointer = CheckpointWritten | CheckpointLoaded | CheckpointFailed | StepTaken
