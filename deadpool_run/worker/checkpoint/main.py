"""The checkpointer: a process, forked for one checkpoint, that writes it from slots or fills slots from it.

It gets the status page and the slots of the node's ranks, and answers one request after the other. Workers never wait for
it. It ends when the agent closes the control socket.
"""

import ctypes
import os
import socket
from typing import assert_never

from deadpool_run.errors import DeadpoolError, VersionGoneError
from deadpool_run.ids import Rank
from deadpool_run.text import without_passwords
from deadpool_run.vault.checkpoint_format import CheckpointStep
from deadpool_run.vault.status_page import StatusPage
from deadpool_run.wire import checkpoints
from deadpool_run.wire.messages import encode
from deadpool_run.worker.checkpoint.read import choose, fill
from deadpool_run.worker.checkpoint.shared import SharedCheckpoint
from deadpool_run.worker.checkpoint.slots import Slots
from deadpool_run.worker.process.agent_link import receive

_Order = checkpoints.ChooseCheckpoint | checkpoints.FillSlots | checkpoints.TakeStep
_PR_SET_NAME = 15
_NICENESS = 10
"""Niceness after the copy: writing can wait, and training cannot."""


def main(control_fd: int) -> None:
    """Serve until the agent closes the control socket."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch's writer would query the driver, and nothing here is on a device
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"deadpool-save", 0, 0, 0)  # the name in top and ps
    control = socket.socket(fileno=control_fd)
    status_page: StatusPage | None = None
    share: SharedCheckpoint | None = None
    slots: dict[Rank, tuple[int, int]] = {}
    while (received := receive(control)) is not None:
        message, fds = received
        match message:
            case checkpoints.LendStatusPage(world_size):
                status_page = StatusPage(fds[0], world_size)
            case checkpoints.LendSlots(rank):
                slots[Rank(rank)] = (fds[0], fds[1])
            case checkpoints.ChooseCheckpoint() | checkpoints.FillSlots() | checkpoints.TakeStep():
                assert status_page is not None
                share = share or SharedCheckpoint(status_page, slots)
                control.sendall(encode(_answered(message, slots, share)))
            case _:
                raise AssertionError(f"a checkpointer received the unexpected message {type(message).__name__}")


def _answered(order: _Order, slots: Slots, share: SharedCheckpoint) -> checkpoints.FromCheckpointer:
    try:
        match order:
            case checkpoints.ChooseCheckpoint():
                return choose(order)
            case checkpoints.FillSlots():
                return fill(order, slots)
            case checkpoints.TakeStep():
                taken = share.take(order)
                if order.step == CheckpointStep.COPY:
                    os.nice(_NICENESS)
                return taken
            case _:
                assert_never(order)
    except VersionGoneError as error:
        return checkpoints.CheckpointFailed(str(error), again=True)
    except DeadpoolError as error:
        return checkpoints.CheckpointFailed(without_passwords(str(error)))
    except Exception as error:  # noqa: BLE001 - fsspec's storage may raise anything; the job continues without a checkpoint
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        return checkpoints.CheckpointFailed(without_passwords(f"{type(error).__name__}: {where}"))
