"""Shared by the snapshot tests: slots that the test holds as an agent does, and children that use them."""

import gc
import hashlib
import os
import random
import signal
import traceback
from multiprocessing.reduction import DupFd

import numpy as np
import torch
from kit.eight_bits import OfEightBits
from kit.world import LIMIT_S, _context
from torch import nn

from deadpool_run.ids import Rank
from deadpool_run.vault.segments import create_memory, read_exactly, read_manifest
from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.worker.snapshot.snapshot import Snapshots


class _Gift:
    """A descriptor that becomes the child's own number as it is pickled for it, which must be while it is started."""

    def __init__(self, fd):
        self._fd = fd

    def __reduce__(self):
        return _received, (DupFd(self._fd),)


def _received(gift):
    return gift.detach()


class Slots:
    """The memory of `ranks` ranks, as an agent makes and keeps it."""

    def __init__(self, ranks=1):
        self.ranks = ranks
        self.status_page_fd = create_status_page(ranks)
        self.fds = [(create_memory(f"{rank}-0"), create_memory(f"{rank}-1")) for rank in range(ranks)]
        self.status_page = StatusPage(self.status_page_fd, ranks)
        self._owned = []

    def gift(self, rank=0):
        """The arguments of a child, which makes a `Given` of them."""
        return self.ranks, rank, *map(_Gift, (self.status_page_fd, *self.fds[rank]))

    def own(self, rank=0, **options):
        """Snapshots in this process."""
        self._owned.append(snapshots_on(self.status_page, self.fds[rank], rank, **options))
        return self._owned[-1]

    def tensors(self, version, rank=0):
        """Read a snapshot as the agent can: bytes by tensor name, from the descriptor only."""
        fd = self.fds[rank][self.status_page.rank_entries[rank].slots.index(version)]
        manifest = read_manifest(fd, version)
        assert manifest.version == version
        return {entry.name: read_exactly(fd, entry.nbytes, entry.offset) for entry in manifest.tensors}

    def close(self):
        for snapshots in self._owned:
            snapshots.close()
        self.status_page.close()
        os.close(self.status_page_fd)
        for pair in self.fds:
            for fd in pair:
                os.close(fd)


def given(gift, **options):
    """The status page and the snapshots of a child."""
    ranks, rank, status_page_fd, *slot_fds = gift
    status_page = StatusPage(status_page_fd, ranks)
    return status_page, snapshots_on(status_page, slot_fds, rank, **options)


def snapshots_on(status_page, slot_fds, rank, *, protect=None, **options):
    options.setdefault("on_skip", lambda *_: None)
    snapshots = Snapshots(slot_fds=tuple(slot_fds), status_page=status_page, rank=Rank(rank), **options)
    for name, obj in (protect or {}).items():
        snapshots.protect(name, obj)
    return snapshots


class Child:
    """A process that runs `target(*args)`; the kill is real."""

    def __init__(self, target, *args):
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_main, args=(theirs, target, args), daemon=True)
        self.process.start()
        theirs.close()

    def result(self):
        """The value that the target returned. Waits for it, and fails with the target's traceback if it raised."""
        assert self._pipe.poll(LIMIT_S), f"pid {self.process.pid} did not finish within {LIMIT_S} s"
        ok, value = self._pipe.recv()
        assert ok, value
        assert self._end() == 0
        return value

    def kill(self):
        """SIGKILL, and wait until it is gone."""
        os.kill(self.process.pid, signal.SIGKILL)
        assert self._end() == -signal.SIGKILL

    def _end(self):
        self.process.join(LIMIT_S)
        code = self.process.exitcode
        self.process.close()
        self._pipe.close()
        return code


def in_child(target, *args):
    return Child(target, *args).result()


def _main(pipe, target, args):
    gc.freeze()
    torch.set_num_threads(1)
    try:
        result = (True, target(*args))
    except BaseException:  # noqa: BLE001 - told to the test
        result = (False, traceback.format_exc())
    pipe.send(result)
    pipe.close()


def capture(snapshots, version):
    """Begin a capture as a step's end does, and wait for its copy."""
    snapshots.begin(version)
    snapshots.wait()


def seed(number):
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global generator is what is under test
    torch.manual_seed(number)


def draws():
    """A number of each generator."""
    return random.random(), float(np.random.standard_normal()), float(torch.randn(())), random.gauss(0, 1)  # noqa: NPY002


def raw(tensor):
    """The bytes of a tensor."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def digest(*trees):
    """A digest of all tensors' bytes and all values, in order."""
    found = hashlib.blake2b()

    def add(tree):
        if hasattr(tree, "__tensor_flatten__"):
            add([getattr(tree, name) for name in tree.__tensor_flatten__()[0]])
        elif isinstance(tree, torch.Tensor):
            found.update(f"{tree.dtype}{tuple(tree.shape)}".encode() + raw(tree))
        elif isinstance(tree, dict):
            for key, value in sorted(tree.items(), key=lambda item: str(item[0])):
                found.update(f"{key}=".encode())
                add(value)
        elif isinstance(tree, list | tuple):
            for value in tree:
                add(value)
        else:
            found.update(repr(tree).encode())

    for tree in trees:
        add(tree)
    return found.hexdigest()


class Training:
    """A model with everything that a snapshot must hold, and steps that draw from every generator."""

    def __init__(self, number, *, optimizer="adamw"):
        seed(number)
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(),
            nn.Flatten(),
            nn.Linear(4 * 4 * 4, 8),
            nn.Linear(8, 8),
        )
        self.model[6].weight = self.model[5].bias.__class__(torch.randn(8, 8))
        self.model[5].register_buffer("seen", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.optimizer = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
            "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
            "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
            "eight bits": OfEightBits,
            "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=2),
        }[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20),
            ],
            [3],
        )
        self.ema = torch.optim.swa_utils.AveragedModel(self.model[6])

    def protected_by(self, snapshots):
        for name in ("model", "optimizer", "scheduler", "ema"):
            snapshots.protect(name, getattr(self, name))
        return snapshots

    def loss(self):
        x = torch.randn(5, 1, 6, 6) + random.random() + float(np.random.standard_normal())  # noqa: NPY002
        self.model[5].seen += 1
        return self.model(x).square().mean()

    def step(self, snapshots=None):
        def closure():
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        if snapshots is not None:
            snapshots.wait()
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.ema.update_parameters(self.model[6])

    def digest(self):
        return digest(
            [*self.model.parameters(), *self.model.buffers(), *self.ema.parameters(), *self.ema.buffers()],
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
        )
