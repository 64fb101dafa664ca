"""Scripts whose steps cannot be aborted: what they do when a collective's answer is empty, because a peer was lost.

Each step begins with two collectives of all ranks. A rank that dies between them (`at=counted`) leaves all others, which
have begun the step, with an empty answer to the second. None of it leaves a trace while nobody is lost.
"""

import sys
import weakref

import torch
import torch.distributed as dist
from faults import BugError
from telling import tell

KINDS = (
    "raise",
    "index",
    "solve",
    "swallow",
    "swallow-outside",
    "retry",
    "converge",
    "exit",
    "leave",
    "once",
    "sleep",
    "bug",
)


class GarbageError(ValueError):
    """The script looked at what it had reduced."""


def prepare(kind):
    """Set up a script of this kind."""
    if kind == "once":
        if hasattr(torch, "astray"):
            raise RuntimeError("what this script registers can be registered only once in a process")
        torch.astray = True


def remember(model):
    """Tell whether the model of the last run of the script in this process is gone."""
    last = getattr(torch, "astray_model", None)
    if last is not None:
        tell("last model", freed=last() is None)
    torch.astray_model = weakref.ref(model)


def count():
    """Return the number of ranks, as they find it out together."""
    one = torch.ones(1)
    dist.all_reduce(one)
    return int(one)


def step_of(kind, step, reach, train):
    """Run one step in the way of this kind; return whether the script goes on."""

    def counted():
        count()
        reach("counted")

    match kind:
        case "swallow-outside":
            try:
                run(kind, step, counted, train)
            except Exception:  # noqa: BLE001 - as scripts do
                print("going on after an exception")
        case "retry":
            with step:
                counted()
                while True:
                    try:
                        train()
                        break
                    except Exception:  # noqa: BLE001 - as scripts do
                        continue
        case "leave":
            with step:
                counted()
                if count() != dist.get_world_size():
                    return False
                train()
        case _:
            run(kind, step, counted, train)
    return True


def run(kind, step, counted, train):
    with step:
        counted()
        if kind == "swallow":
            try:
                look("raise")
                train()
            except Exception:  # noqa: BLE001 - as scripts do
                print("going on after an exception")
        else:
            look(kind)
            train()


def look(kind):  # noqa: PLR0912 - one case for each kind
    """Depend on what all ranks found out together."""
    world = dist.get_world_size()
    match kind:
        case "index":
            {world: "all are there"}[count()]
        case "solve":
            matrix = torch.eye(2) if dist.get_rank() == 0 else torch.zeros(2, 2)
            dist.broadcast(matrix, 0)
            if (
                dist.get_rank() == 3
            ):  # gets it through rank 1, so it never does; others may be aborted before they have it
                torch.linalg.inv(matrix)
        case "converge":
            while count() != world:
                pass
        case "sleep":
            if count() != world:
                import ctypes  # noqa: PLC0415 - only here

                ctypes.CDLL(None).sleep(1000)  # not in Python: nothing can be raised here
        case "exit":
            if count() != world:
                sys.exit(3)
        case "bug":
            if count() != world:
                raise BugError("a tensor that the script should have checked")
        case "count":
            count()
        case _:
            if count() != world:
                raise GarbageError("not everybody was counted")
