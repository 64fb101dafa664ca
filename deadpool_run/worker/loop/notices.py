"""Texts of the loop's warnings and refusals: what was found, what follows from it, and what the script can do."""

from collections.abc import Sequence

from deadpool_run.text import shortened, size
from deadpool_run.worker.transcript.transcript import MAX_BYTES
from deadpool_run.worker.variables.first_values import OTHER_SETUP
from deadpool_run.worker.variables.values.lost import advice


def too_much_received(what: Sequence[str]) -> str:
    """Return why a job is refused whose set-up receives this data."""
    return (
        f"in set-up, collectives returned more than {size(MAX_BYTES)} of data that no protected object has. It cannot be given to a "
        f"replacement: {shortened(what)}.\n"
        "Read it from a file on each rank, or job.protect() an object that has it (a buffer of a module, say). "
        "deadpool_run.init(verify=False) turns this check off."
    )


def late_group(group: str) -> str:
    """Return the warning of a group that a replacement does not create."""
    return (
        f"the process group {group!r} was created after the first two steps. A replacement for a lost rank does not create it, "
        "so a loss stops the job from now on.\nCreate every group before job.steps()."
    )


def unkept(name: str, why: str) -> str:
    """Return the warning of a variable that changes and that snapshots do not keep."""
    return (
        f"{name} changes, and snapshots do not keep it: {why}. After a loss, a script that reads it is refused.\n"
        f"{advice(why)}"
    )


def left_alone(names: Sequence[str], rank: int) -> str:
    """Return the warning of objects that a replacement does not have as the lost process had them."""
    return (
        f"snapshots do not keep {', '.join(names)}: the new process of rank {rank} goes on without what training "
        "has changed there.\n"
        "Nothing is lost by that for a progress bar, a log, or functools.lru_cache with results that depend on nothing but the "
        "arguments. If the weights depend on one, call job.protect() with an object "
        "that has its state (state_dict() and load_state_dict())."
    )


def changed_alone(step: int, names: Sequence[str]) -> str:
    """Return the warning of objects that a step changes and that no snapshot holds, before they have an effect."""
    return (
        f"step {step} changes {shortened(names)}, and snapshots do not keep what is in there. It was changed a second time when the step was run "
        "twice for the trial, and would be again when a step is repeated after a loss.\n"
        "Nothing is lost by that for what is only shown or stored. If the weights depend on it, call job.protect() with an object that has "
        "its state (state_dict() and load_state_dict())."
    )


def edited(files: Sequence[str]) -> str:
    """Return why a replacement is refused that would run other modules than the other ranks."""
    return (
        f"{', '.join(files)} was edited since the job began: a replacement would run other code than the other ranks.\n"
        "Undo the edit before you start the job again, or start each job from its own copy of the code."
    )


def other_total(total: int, first: int) -> str:
    """Return why a replacement is refused whose loop has another length than the `first` process's."""
    return f"job.steps() has {total} steps here and had {first} in the rank's first process. {OTHER_SETUP}"


def other_numbers(names: Sequence[str]) -> str:
    """Return the warning of variables that set-up gave other numbers in a replacement."""
    return f"{shortened(names)}. {OTHER_SETUP}"
