"""Reports to the agent that the script failed because of a lost peer, so that its step cannot be drained."""

import traceback

from msgspec.structs import replace

from deadpool_run.wire.messages import DrainBroke
from deadpool_run.worker.process.agent_link import AgentLink
from deadpool_run.worker.process.blame import blame


class ScriptFailure:
    """Whether this run of the script has failed, and why; reported again in each later epoch."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._report: DrainBroke | None = None

    def note(self, why: str | BaseException, step: int | None) -> None:
        """Note the failure, and the step in which it happened; `None`: outside the loop."""
        if isinstance(why, str):
            self._report = DrainBroke(0, why)
            return
        kind, text = type(why).__name__, "".join(traceback.format_exception(why))
        self._report = DrainBroke(
            0, f"{kind}: {why}", step=step, kind=kind, error=str(why), traceback=text, blame=blame(why)
        )

    def report(self, epoch: int, *, attached: int) -> None:
        """Report the failure, if there is one, in this epoch.

        Only in an epoch newer than the one that the groups are attached to: in any other the agent would ignore it.
        """
        if self._report is not None and epoch > attached:
            self._link.send(replace(self._report, epoch=epoch, again=self._link.reentrant))
