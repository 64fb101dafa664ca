"""The checkpointer: a process, forked for one checkpoint, that writes it from slots or fills slots from it.

It gets the status page and the slots of the node's ranks, and answers one request after the other. Workers never wait for
it. It ends when the agent closes the control socket.
"""

import array
import ctypes
import os
import socket
from typing import assert_never

from deadpool_run.errors import DeadpoolError, VersionGoneError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.checkpoint_format import NOTHING, CheckpointStep
from deadpool_run.vault.status_page import StatusPage
from deadpool_run.wire.checkpoints import (
    CheckpointFailed,
    CheckpointLoaded,
    CheckpointWritten,
    ChooseCheckpoint,
    FillSlots,
    FromCheckpointer,
    LendBoard,
    LendSlots,
    LoadCheckpoint,
    StepTaken,
    TakeStep,
    WriteCheckpoint,
)
from deadpool_run.wire.messages import FrameBuffer, Message, encode
from deadpool_run.worker.checkpoint.read import Loaded, choose, fill, load
from deadpool_run.worker.checkpoint.shared import SharedCheckpoint
from deadpool_run.worker.checkpoint.slots import copy_committed
from deadpool_run.worker.checkpoint.storage import storage_at
from deadpool_run.worker.checkpoint.write import prune, write

_Order = WriteCheckpoint | LoadCheckpoint | ChooseCheckpoint | FillSlots | TakeStep
_MAX_FDS = 2
_PR_SET_NAME = 15
_NAME = b"deadpool-save"
_NICENESS = 10
"""Niceness after the copy: writing can wait, and training cannot."""


def main(control_fd: int) -> None:
    """Serve until the agent closes the control socket."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch's writer would query the driver, and nothing here is on a device
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME, 0, 0, 0)  # the name in top and ps
    control = socket.socket(fileno=control_fd)
    status_page: StatusPage | None = None
    share: SharedCheckpoint | None = None
    slots: dict[Rank, tuple[int, int]] = {}
    while (received := _receive(control)) is not None:
        message, fds = received
        match message:
            case LendBoard(world_size):
                status_page = StatusPage(fds[0], world_size)
            case LendSlots(rank):
                slots[Rank(rank)] = (fds[0], fds[1])
            case WriteCheckpoint() | LoadCheckpoint() | ChooseCheckpoint() | FillSlots() | TakeStep():
                assert status_page is not None
                share = share or SharedCheckpoint(status_page, slots)
                control.sendall(encode(_answered(message, status_page, slots, share)))
            case _:
                raise AssertionError(f"a checkpointer received the unexpected message {type(message).__name__}")


def _receive(control: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message with its descriptors. Reads no byte after it, which may carry other descriptors."""
    frames = FrameBuffer()
    fds = array.array("i")
    while True:
        data, more, _, _ = socket.recv_fds(control, frames.missing, _MAX_FDS)
        fds.extend(more)
        if not data:
            return None
        for message in frames.feed(data):
            return message, list(fds)


def _answered(
    order: _Order, status_page: StatusPage, slots: dict[Rank, tuple[int, int]], share: SharedCheckpoint
) -> FromCheckpointer:
    try:
        return _done(order, status_page, slots, share)
    except VersionGoneError as error:
        return CheckpointFailed(str(error), again=True)
    except DeadpoolError as error:
        return CheckpointFailed(str(error))
    except Exception as error:  # noqa: BLE001 - storage behind URLs may raise anything; the job goes on without a checkpoint
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        return CheckpointFailed(f"{type(error).__name__}: {where}")


def _done(
    order: _Order, status_page: StatusPage, slots: dict[Rank, tuple[int, int]], share: SharedCheckpoint
) -> FromCheckpointer:
    match order:
        case WriteCheckpoint():
            return _write(order, status_page, slots)
        case LoadCheckpoint():
            return _loaded(load(order, slots))
        case ChooseCheckpoint():
            return _loaded(choose(order))
        case FillSlots():
            return _loaded(fill(order, slots))
        case TakeStep():
            return _take(order, share)
        case _:
            assert_never(order)


def _write(order: WriteCheckpoint, status_page: StatusPage, slots: dict[Rank, tuple[int, int]]) -> FromCheckpointer:
    copies = copy_committed(status_page, slots, Version(order.above))
    if copies is None:
        return CheckpointWritten(NOTHING, "", 0)
    os.nice(_NICENESS)
    storage = storage_at(order.target)
    name, nbytes = write(storage, copies, order.run)
    version = Version(copies[0].header.version)
    prune(storage, version, order.keep)
    return CheckpointWritten(version, storage.where(name), nbytes)


def _take(order: TakeStep, share: SharedCheckpoint) -> StepTaken:
    taken = share.take(order)
    if order.step == CheckpointStep.COPY:
        os.nice(_NICENESS)
    return taken


def _loaded(found: Loaded) -> FromCheckpointer:
    return CheckpointLoaded(found.version, found.where, found.written, list(found.refused))
