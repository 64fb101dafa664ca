"""Snapshots of a model on a CUDA device."""

import os
import threading

import pytest
import torch
from torch import nn

from deadpool_run.ids import Rank
from deadpool_run.vault.segments import create_memory
from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.worker.snapshot.snapshot import Snapshots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def memory():
    status_page_fd = create_status_page(1)
    fds = (create_memory("0"), create_memory("1"))
    status_page = StatusPage(status_page_fd, 1)
    yield status_page, fds
    status_page.close()
    for fd in (status_page_fd, *fds):
        os.close(fd)


class Training:
    def __init__(self, number, *, capturable=False):
        torch.manual_seed(number)
        self.model = nn.Sequential(
            nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Dropout(), nn.ReLU(), nn.Linear(2048, 8)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, capturable=capturable)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=2)

    def protected_by(self, snapshots):
        for name in ("model", "optimizer", "scaler"):
            snapshots.protect(name, getattr(self, name))
        return snapshots

    def step(self, snapshots=None):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(torch.randn(64, 512, device="cuda")).square().mean()
        self.scaler.scale(loss).backward()
        if snapshots is not None:
            snapshots.wait()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def tensors(self):
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return [t.detach().cpu().clone() for t in (*self.model.parameters(), *self.model.buffers(), *state)]


def _equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _snapshots(memory, **options):
    status_page, fds = memory
    return Snapshots(slot_fds=fds, status_page=status_page, rank=Rank(0), on_skip=lambda *_: None, **options)


@pytest.mark.parametrize("capturable", [False, True])
def test_another_model_goes_on_bit_for_bit(memory, capturable):
    training = Training(1, capturable=capturable)
    snapshots = training.protected_by(_snapshots(memory))
    snapshots.capture_now(0)
    for version in range(1, 6):
        training.step(snapshots)
        snapshots.begin(version)
    then = training.tensors()
    training.step(snapshots)
    later = training.tensors()
    scale = training.scaler.get_scale()
    assert snapshots.held() == (4, 5)
    snapshots.close()
    other = Training(2, capturable=capturable)
    theirs = other.protected_by(_snapshots(memory))
    theirs.restore(5)
    assert _equal(other.tensors(), then)
    other.step(theirs)
    assert _equal(other.tensors(), later)
    assert other.scaler.get_scale() == scale
    theirs.close()


def test_what_an_interrupted_step_has_left_on_another_stream_does_not_write_after_a_restore(memory):
    model = nn.ParameterList([torch.zeros(1 << 20)]).cuda()
    snapshots, side = _snapshots(memory), torch.cuda.Stream()
    snapshots.protect("model", model)
    snapshots.capture_now(0)
    with torch.no_grad(), torch.cuda.stream(side):
        torch.cuda._sleep(1 << 30)  # a good half second
        model[0].fill_(-1)
    snapshots.restore(0)
    torch.cuda.synchronize()
    assert not model[0].any()
    snapshots.close()


def test_a_snapshot_is_of_the_step_that_it_says(memory):
    model = nn.ParameterList([torch.zeros(1 << 26)]).cuda()  # 256 MiB: a copy of many milliseconds
    snapshots = _snapshots(memory)
    snapshots.protect("model", model)
    snapshots.capture_now(0)
    for version in range(1, 6):
        with torch.no_grad():
            model[0].fill_(version)
        snapshots.begin(version)
        snapshots.wait()
        with torch.no_grad():
            model[0].fill_(-1)
        snapshots.restore(version)
        assert model[0].min().item() == model[0].max().item() == version
    snapshots.close()


def test_slots_are_pinned(memory):
    snapshots = _snapshots(memory)
    snapshots.protect("model", nn.Linear(8, 8).cuda())
    snapshots.capture_now(0)
    assert snapshots._slots.memories[0]._pinned
    snapshots.close()


def test_a_rewind_undoes_an_interrupted_forward(memory):
    training = Training(1)
    snapshots = training.protected_by(_snapshots(memory))
    training.step()
    snapshots.begin(1)
    before = training.tensors()
    want = torch.rand(3, device="cuda").tolist()
    training.model(torch.randn(64, 512, device="cuda"))
    assert not _equal(before, training.tensors())
    snapshots.rewind(1)
    assert _equal(before, training.tensors())
    assert torch.rand(3, device="cuda").tolist() == want
    snapshots.close()


def test_a_step_whose_kernels_had_not_ended_at_an_interruption_is_no_snapshot(memory):
    interrupted = threading.Event()
    training = Training(1)
    snapshots = training.protected_by(_snapshots(memory, interrupted=interrupted.is_set))
    snapshots.capture_now(0)
    training.step(snapshots)
    torch.cuda._sleep(200_000_000)  # a collective that does not end before it is aborted
    snapshots.begin(1)
    interrupted.set()
    snapshots.wait()
    assert snapshots.held() == (0,)
    snapshots.close()


def test_a_slot_that_was_read_first_is_pinned_too(memory):
    training = Training(1)
    snapshots = training.protected_by(_snapshots(memory))
    snapshots.capture_now(0)
    snapshots.capture_now(1)
    snapshots.close()
    theirs = Training(2).protected_by(_snapshots(memory))
    theirs.restore(1)
    theirs.capture_now(2)
    theirs.capture_now(3)
    assert [slot._pinned for slot in theirs._slots.memories] == [True, True]
    theirs.close()


def test_a_step_whose_kernels_had_ended_is_captured_whatever_comes_later(memory):
    training = Training(1)
    snapshots = training.protected_by(_snapshots(memory, interrupted=lambda: True))
    training.step()
    torch.cuda.synchronize()
    snapshots.begin(1)
    snapshots.wait()
    assert snapshots.held() == (1,)
    snapshots.close()


def test_a_survivor_keeps_what_only_forward_and_backward_have_used(memory):
    training = Training(1)
    snapshots = training.protected_by(_snapshots(memory))
    training.step(snapshots)
    snapshots.begin(1)
    assert snapshots.is_untouched()
    training.model[0].weight.data[0] += 1
    assert not snapshots.is_untouched()
    snapshots.close()
