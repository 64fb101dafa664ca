"""The trial: after each start, one step is run twice from the same state, and must give the same weights both times.

A step that a loss interrupts is repeated from its snapshot. State that a script carries from step to step outside of its
protected objects and of the variables that snapshots keep (an iterator's position, a batch on a GPU) is not restored, and would
silently change the weights. The trial finds that before anything is lost: the first run of the step is a rehearsal, its
state is restored from the snapshot as after a loss, and the second run counts.

In the second run, functions with `functools.lru_cache` compute again, as in a replacement, which lacks their later results.

The trial begins with step 1, because most lazy objects are created in step 0. A DDP that has not decided its buckets reduces
in another order afterwards, so the trial waits for that decision. A step that updates no weights, because gradients are
accumulated over steps, proves nothing: the next one is tried, too.
"""

from collections.abc import Callable
from enum import Enum

import torch

from deadpool_run.text import shortened
from deadpool_run.worker.loop import notices
from deadpool_run.worker.variables.left_alone import Unwritten
from deadpool_run.worker.verify.script_names import warn

_TRIED_STEPS = 64
"""Up to this many steps without an update are tried. Longer accumulation would double the time of too many steps."""
_CARRIED = (
    "state from one step to the next that no snapshot holds, such as the position of an iterator, a prefetched batch, a random "
    "result of a function with functools.lru_cache, an average of the weights, an attribute of a module or what persistent workers "
    "of a loader change in their copy of the data set"
)


class Trial:
    """The stage of the trial, and the digests of its first run."""

    class Stage(Enum):
        """The stages of the trial."""

        DUE = "due"
        RUNNING = "running"
        RAN = "ran"
        OVER = "over"

    def __init__(self, *, wanted: bool, tells: bool) -> None:
        """`tells`: this rank warns of objects that no snapshot holds, if the step changes them without an effect yet."""
        self.stage = Trial.Stage.DUE if wanted else Trial.Stage.OVER
        self._observed: dict[str, int] | None = None
        self._before: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._left_out: dict[str, Unwritten] = {}
        self._tells = tells
        self._notice = ""
        self._tried = 0

    @property
    def running(self) -> bool:
        """Whether the running step is the trial's first run."""
        return self.stage is Trial.Stage.RUNNING

    @property
    def tries(self) -> bool:
        """Whether the running step is one of the trial's two runs."""
        return self.stage in (Trial.Stage.RUNNING, Trial.Stage.RAN)

    def begin(self, counts: dict[str, int], left_out: dict[str, Unwritten]) -> None:
        """Begin the first run, with these whole numbers in variables, and digests of what snapshots do not keep."""
        self.stage = Trial.Stage.RUNNING
        self._before, self._left_out = counts, left_out

    def observe(self, digests: dict[str, int], counts: dict[str, int]) -> None:
        """Keep the digests of the first run, by tensor, and the whole numbers in variables."""
        self._observed, self._counts = digests, counts

    def end(self) -> None:
        """End the first run; after a loss, try another step."""
        self.stage = Trial.Stage.DUE if self._observed is None else Trial.Stage.RAN

    def interrupt(self, *, due: bool) -> None:
        """Begin again after a repair, if the trial is still due."""
        self.stage = Trial.Stage.DUE if due else Trial.Stage.OVER
        self._observed = None

    def conclude(self, *, updated: bool) -> None:
        """End the trial, or try the next step if no rank updated weights in this one."""
        self._tried += 1
        self.stage = Trial.Stage.OVER if updated or self._tried >= _TRIED_STEPS else Trial.Stage.DUE
        if self._notice and self.stage is Trial.Stage.OVER:
            warn(self._notice)

    def verdict(
        self, step: int, digests: dict[str, int], counts: dict[str, int], left_out: Callable[[], dict[str, Unwritten]]
    ) -> str:
        """Compare the second run with the first; return an error message, empty if they are equal.

        A number that grows by one in each run counts the runs: it comes from an iterator, say, and may have an effect later.
        """
        counting = [
            name
            for name, count in self._counts.items()
            if self._before.get(name) == count - 1 and counts.get(name) == count + 1
        ]
        if counting:
            return (
                f"step {step} was run twice from the same state, and {shortened(counting)} was {self._counts[counting[0]]} in the "
                f"first run and {counts[counting[0]]} in the second: it counts something that is not put back when a step is "
                "repeated after a loss, such as the items of enumerate() or of another iterator.\n"
                "Use step.index, or a variable that the step itself changes. deadpool_run.init(verify=False) turns this check off."
            )
        observed, self._observed = self._observed or {}, None
        names = dict.fromkeys([*observed, *digests])
        different = [name for name in names if observed.get(name) != digests.get(name)]
        if not different:
            if self._tells:
                now = left_out()
                changed = [name for name in self._all_changed(now) if now[name].of_concern]
                self._notice = notices.changed_alone(step, changed) if changed else ""
            return ""
        return (
            f"step {step} was run twice from the same state and gave different results: "
            f"{shortened(different)} of {len(names)} differ. After a loss the interrupted step is "
            f"run again, and would change the weights.\n{self._why(left_out())}"
        )

    def _all_changed(self, left_out: dict[str, Unwritten]) -> list[str]:
        return [name for name, each in left_out.items() if self._left_out.get(name, each).digest != each.digest]

    def _why(self, left_out: dict[str, Unwritten]) -> str:
        changed = self._all_changed(left_out)
        deterministic = torch.are_deterministic_algorithms_enabled()
        advice = "" if deterministic else ": call torch.use_deterministic_algorithms(True)"
        carried = _CARRIED
        if changed:
            carried = f"{shortened(changed)}, which the step changes and no snapshot holds"
        return (
            f"Either the script carries {carried}: take batches from job.batches(loader), derive "
            "them from step.index, or job.protect() an object that has the state. "
            "Or it skips work while job.rehearsing is true: skip only output. "
            f"Or the computation is not reproducible{advice}. deadpool_run.init(verify=False) turns this check off."
        )
