"""What a worker says when its script went astray on what a lost peer left, and cannot be drained."""

import traceback

from msgspec.structs import replace

from deadpool_run.wire.messages import DrainBroke
from deadpool_run.worker.process.agent_link import AgentLink
from deadpool_run.worker.process.blame import blame


class ScriptFailure:
    """Whether a run of the script went astray, and why; the agent is told in every epoch that begins behind it."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._said: DrainBroke | None = None

    def note(self, why: str | BaseException, step: int | None) -> None:
        """Note what happened, and in which step; `None`: outside the loop."""
        if isinstance(why, str):
            self._said = DrainBroke(0, why)
            return
        kind, text = type(why).__name__, "".join(traceback.format_exception(why))
        self._said = DrainBroke(
            0, f"{kind}: {why}", step=step, kind=kind, error=str(why), traceback=text, blame=blame(why)
        )

    def tell(self, epoch: int, *, attached: int) -> None:
        """Say it for this epoch, if it is newer than the one that the groups are attached to.

        Of an epoch that is over, or not yet known, it would not be heard.
        """
        if self._said is not None and epoch > attached:
            self._link.send(replace(self._said, epoch=epoch, again=self._link.reentrant))
