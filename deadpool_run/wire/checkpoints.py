"""Messages between an agent and its checkpointer. `wire.messages` has their encoding.

The leader's orders to write pass through the nodes' agents as they are.
"""

from deadpool_run.structs import Tagged, Untagged

DEFAULT_DURABLE_TIMEOUT_S = 1800.0


class DurableSpec(Untagged, kw_only=True):
    """Checkpoints that outlive the job."""

    target: str
    """A directory or a URL; empty: none is written, and `resume` names the one to begin from."""
    every_steps: int | None = None
    every_s: float | None = None
    """One of both is set where there is a target."""
    keep: int = 2
    """How many of the newest are kept."""
    resume: str = "auto"
    """auto, never, or a checkpoint's path or URL."""
    timeout_s: float = DEFAULT_DURABLE_TIMEOUT_S
    """Timeout of one step of writing or loading on one node."""
    exit_on_usr1: bool = True
    """Whether SIGUSR1 ends the job, to be queued again, after its checkpoint."""


class LendStatusPage(Tagged):
    """Lends the status page. Comes with one descriptor."""

    world_size: int


class LendSlots(Tagged):
    """Lends a rank's slots. Comes with two descriptors."""

    rank: int


class ChooseCheckpoint(Tagged):
    """Asks which checkpoint the job resumes from, other than those in `but`, which some node could not load.

    `resume` is "auto", "never" or a checkpoint's path or URL. `first`: the job begins. A world that restarts uses only the
    checkpoints of its own job.
    """

    target: str
    run: str
    resume: str
    first: bool
    world_size: int
    but: list[str]


class FillSlots(Tagged):
    """Orders to fill every lent rank's first slot from this checkpoint, if its record has this digest."""

    where: str
    world_size: int
    record: str


class TakeStep(Tagged):
    """Orders a step (a `checkpoint_format.CheckpointStep`) of a checkpoint that all nodes write together.

    `attempt` is unique, and `ranks` are the node's own. `firsts` has the first rank of each node that writes. One node `leads`:
    it does what is done once. Every rank holds the version until it is copied.
    """

    step: str
    target: str
    run: str
    attempt: str
    version: int
    keep: int
    world_size: int
    firsts: tuple[int, ...]
    leads: bool
    ranks: tuple[int, ...]


class StepTaken(Tagged):
    """Reports that a step is done. After the last one, `where` and `nbytes` are those of the checkpoint.

    `uncleaned` has a report of each thing that could not be removed.
    """

    step: str
    where: str
    nbytes: int
    uncleaned: tuple[str, ...] = ()


class CheckpointLoaded(Tagged):
    """Reports the version that the slots hold. -1: there is no checkpoint to resume from.

    `written` is the time of writing: ISO-8601, UTC. `refused` has the reason why each newer checkpoint was not loaded.
    `record` is the digest of the checkpoint's record.
    """

    version: int
    where: str
    written: str
    refused: list[str]
    record: str


class CheckpointFailed(Tagged):
    """Reports that an order failed. `again`: the ranks no longer hold this version, and a later one may be written.

    `died`: the process that was to do it ended, for example by a signal. Another one may succeed.
    """

    why: str
    again: bool = False
    died: bool = False


ToCheckpointer = LendStatusPage | LendSlots | ChooseCheckpoint | FillSlots | TakeStep
FromCheckpointer = CheckpointLoaded | CheckpointFailed | StepTaken
