"""When a capture is made, of what, and into which slot."""

import contextlib
import threading

import pytest
import torch
from snapshot_kit import Training, capture, digest, draws, raw
from torch import nn

from deadpool_run.errors import RefusedError, ScriptError, SnapshotError
from deadpool_run.vault.segments import mark_busy, read_header, read_manifest
from deadpool_run.vault.status_page import BUSY, EMPTY
from deadpool_run.worker.check.conformance import later
from deadpool_run.worker.snapshot.snapshot import Snapshots

pytestmark = pytest.mark.usefixtures("copied")

BIG = 1 << 22


@pytest.fixture
def pair(make_slots):
    return make_slots(2)


def test_a_snapshot_is_of_the_step_that_it_says(slots):
    model = nn.ParameterList([torch.zeros(BIG), torch.zeros(())])
    model.register_buffer("count", torch.zeros(3))
    snapshots = slots.own(protect={"model": model})
    snapshots.capture_now(0)
    for version in range(1, 12):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(version)
        model.count.fill_(version)
        snapshots.begin(version)
        model.count.fill_(-1)  # the next forward, beside the copy
        snapshots.wait()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-1)  # the optimizer's step
        assert set(slots.tensors(version)["model/0"]) == set(raw(torch.tensor(float(version))))
        assert slots.tensors(version)["model/count"] == raw(torch.full((3,), float(version)))
        assert snapshots.held() == (version - 1, version)
    assert slots.status_page.rank_entries[0].capture_ns > 0


@pytest.mark.parametrize("write", [torch.Tensor.add_, lambda one, other: one.data.add_(other)], ids=["", "data"])
def test_weights_written_during_a_copy_are_never_called_a_snapshot(slots, write):
    skipped, captured = [], []
    model = nn.ParameterList([torch.zeros(BIG)])
    written = threading.Event()
    written.set()

    def interrupted():
        """Asked by the copy thread before it copies: let the script write first."""
        return threading.current_thread() is not threading.main_thread() and not written.wait(60)

    snapshots = slots.own(
        on_skip=lambda version, _: skipped.append(version),
        on_captured=captured.append,
        interrupted=interrupted,
        protect={"model": model},
    )
    snapshots.capture_now(0)
    written.clear()
    snapshots.begin(1)
    with torch.no_grad():
        write(model[0], 1)  # not an optimizer's step, so that nothing waited
    written.set()
    snapshots.wait()
    assert snapshots.held() == (0,)
    assert skipped == [1]
    assert slots.status_page.rank_entries[0].skipped == 1
    capture(snapshots, 2)
    assert snapshots.held() == (0, 2)
    assert captured == [0, 2]


def test_only_versions_that_the_interval_divides_are_captured(slots):
    snapshots = slots.own(interval=3, protect={"model": nn.Linear(2, 2)})
    held = []
    for version in range(8):
        capture(snapshots, version)
        held.append(snapshots.held())
    assert held == [(0,), (0,), (0,), (0, 3), (0, 3), (0, 3), (3, 6), (3, 6)]
    snapshots.interval = 1
    capture(snapshots, 8)
    assert snapshots.held() == (6, 8)


def fill(snapshots):
    """Have both slots hold a version: 0 and 1."""
    for version in range(2):
        capture(snapshots, version)


def test_a_capture_that_finds_no_slot_is_skipped_and_announced(pair):
    skipped = []
    snapshots = pair.own(0, on_skip=lambda version, _: skipped.append(version))
    other = pair.status_page.rank_entries[1]
    fill(snapshots)
    other.set_slot(0, 0)
    snapshots.begin(2)  # version 0 is committed, 1 may come to be
    snapshots.wait()
    assert snapshots.held() == (0, 1)
    assert skipped == [2]
    assert pair.status_page.rank_entries[0].skipped == 2
    other.set_slot(1, 1)
    capture(snapshots, 3)
    assert snapshots.held() == (1, 3)


def test_a_peers_skip_frees_the_slot(pair):
    skipped = []
    snapshots = pair.own(0, on_skip=lambda version, _: skipped.append(version))
    other = pair.status_page.rank_entries[1]
    other.set_slot(0, 0)
    fill(snapshots)
    other.skipped = 1
    capture(snapshots, 2)
    assert snapshots.held() == (0, 2)
    assert skipped == []


def begin_unhurried(snapshots, version):
    """As behind the last step: peers overwrite what was given up, so that it could never be committed."""
    snapshots.begin(version)
    snapshots.wait(cancel_pending=False)
    return version in snapshots.held()


@pytest.mark.parametrize("captured", [Snapshots.capture_now, begin_unhurried])
def test_a_capture_waits_for_a_slot_while_it_may(pair, captured):
    skipped = []
    snapshots = pair.own(0, on_skip=lambda version, _: skipped.append(version))
    other = pair.status_page.rank_entries[1]
    fill(snapshots)
    other.set_slot(0, 0)
    with later(0.1, lambda: other.set_slot(1, 1)):
        assert captured(snapshots, 2)
    assert snapshots.held() == (1, 2)
    assert skipped == []


def test_an_interruption_ends_the_wait_for_a_slot(pair):
    interrupted = threading.Event()
    skipped = []
    snapshots = pair.own(0, on_skip=lambda version, _: skipped.append(version), interrupted=interrupted.is_set)
    pair.status_page.rank_entries[1].set_slot(0, 0)
    for version in range(2):
        assert snapshots.capture_now(version)
    with later(0.1, interrupted.set):
        assert not snapshots.capture_now(2)
    assert skipped == [2]


def test_discarded_versions_are_gone_for_everybody(slots):
    snapshots = slots.own()
    for version in range(3):
        snapshots.begin(version)
    slots.status_page.rank_entries[0].skipped = 9
    snapshots.discard_newer(1)
    assert snapshots.held() == (1,)
    assert slots.status_page.rank_entries[0].skipped == EMPTY
    assert [read_header(fd).version for fd in slots.fds[0]] == [EMPTY, 1]
    capture(snapshots, 2)
    assert snapshots.held() == (1, 2)


def test_a_version_made_again_is_no_longer_skipped(slots):
    snapshots = slots.own()
    slots.status_page.rank_entries[0].skipped = 1
    capture(snapshots, 1)
    assert slots.status_page.rank_entries[0].skipped == EMPTY


def test_a_new_owner_trusts_no_slot_on_which_header_and_status_page_differ(slots):
    snapshots = slots.own()
    for version in range(2):
        snapshots.begin(version)
    snapshots.close()
    mark_busy(slots.fds[0][0])
    slots.status_page.rank_entries[0].set_slot(1, BUSY)
    theirs = slots.own()
    assert theirs.held() == ()
    assert slots.status_page.rank_entries[0].slots == (EMPTY, EMPTY)


def test_what_is_added_later_is_captured(slots):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    snapshots = slots.own(protect={"model": model, "optimizer": optimizer})
    snapshots.capture_now(0)
    assert len(slots.tensors(0)) == 2
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    capture(snapshots, 1)
    assert len(slots.tensors(1)) == 2 + 6
    loose = torch.ones(BIG, requires_grad=True)
    optimizer.add_param_group({"params": [loose]})
    model.register_buffer("late", torch.ones(2))
    capture(snapshots, 2)
    found = slots.tensors(2)
    assert len(found) == 2 + 6 + 2
    assert found["optimizer/1.0"] == raw(loose)
    moved = torch.zeros(2, 2)
    model.weight.data = moved  # other memory under the same parameter
    capture(snapshots, 3)
    assert slots.tensors(3)["model/weight"] == raw(moved)
    with torch.no_grad():
        loose.zero_()
    snapshots.restore(2)
    assert raw(loose) == raw(torch.ones(BIG))


def test_the_plan_is_kept_while_nothing_is_added(slots):
    training = Training(1)
    snapshots = training.protected_by(slots.own())
    training.step()
    snapshots.capture_now(1)
    plan = snapshots._plan
    for version in range(2, 5):
        training.step(snapshots)
        snapshots.begin(version)
    assert snapshots._plan is plan


def test_a_layout_that_is_dense_is_kept(slots):
    training = Training(1)
    snapshots = training.protected_by(slots.own())
    snapshots.capture_now(0)
    entries = {entry.name: entry for entry in read_manifest(slots.fds[0][0], 0).tensors}
    weight = training.model[0].weight
    assert not weight.is_contiguous() or weight.shape[1] == 1
    assert entries["model/0.weight"].stride == weight.stride()


def test_a_rewind_undoes_an_interrupted_forward(slots):
    training = Training(1)
    snapshots = training.protected_by(slots.own())
    training.step()
    snapshots.begin(1)
    before, want = training.digest(), draws()
    torch.set_rng_state(torch.get_rng_state())
    snapshots.rewind(1)
    assert draws() == want
    for _ in range(2):  # twice: what was put back is a copy too
        training.loss().backward()
        training.scheduler.step()
        training.model[1].running_mean = torch.full((4,), torch.nan)
        training.model[5].seen = None
        snapshots.rewind(1)
        assert training.digest() == before
        assert all(parameter.grad is None for parameter in training.model.parameters())
        assert draws() == want


def test_modules_are_in_training_or_evaluation_as_they_were(slots):
    """An evaluation that a loss interrupts may leave the mode, and batch norm would then use other numbers."""
    training = Training(1)
    snapshots = training.protected_by(slots.own())
    training.step()
    training.model[1].eval()
    snapshots.capture_now(1)
    before = [child.training for child in training.model.modules()]
    assert len(set(before)) == 2
    for put in (snapshots.rewind, snapshots.restore):
        training.model.eval()
        put(1)
        assert [child.training for child in training.model.modules()] == before


def test_a_rewind_is_only_to_the_last_version(slots):
    snapshots = slots.own()
    snapshots.begin(1)
    with pytest.raises(SnapshotError, match="cannot rewind to version 0: the worker's own copy is of version 1"):
        snapshots.rewind(0)


def test_a_rewind_works_between_captures_and_after_a_restore(slots):
    training = Training(1)
    snapshots = training.protected_by(slots.own(interval=2))
    for version in range(4):
        snapshots.begin(version)
        training.step(snapshots)
    snapshots.restore(2)
    before = training.digest()
    training.loss()
    snapshots.rewind(2)
    assert training.digest() == before
    training.step(snapshots)
    snapshots.begin(3)
    before = training.digest()
    training.loss()
    snapshots.rewind(3)
    assert training.digest() == before


def test_gradients_that_stay_allocated_are_lost_in_place(slots):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    snapshots = slots.own(protect={"model": model, "optimizer": optimizer})
    model(torch.ones(2)).sum().backward()
    kept = model.weight.grad
    for put in (snapshots.rewind, snapshots.restore):
        snapshots.note_optimizer(optimizer)  # which has used them
        snapshots.capture_now(0)
        model(torch.ones(2)).sum().backward()
        put(0)
        assert model.weight.grad is kept
        with pytest.raises(RefusedError, match="the gradient of model/weight is used in a step that has not set it"):
            kept.any()
        optimizer.zero_grad(set_to_none=False)
        assert model.weight.grad is kept
        assert not kept.any()


def test_gradients_that_no_optimizer_has_used_are_state(slots):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    snapshots = slots.own(protect={"model": model, "optimizer": optimizer})
    model(torch.tensor([1.0, 2.0])).sum().backward()
    want = model.weight.grad.clone()
    for put in (snapshots.rewind, snapshots.restore):
        snapshots.capture_now(0)
        model(torch.ones(2)).sum().backward()
        put(0)
        assert torch.equal(model.weight.grad, want)
    model.zero_grad()
    snapshots.restore(0)
    assert torch.equal(model.weight.grad, want)


def test_nothing_protected_is_still_a_snapshot(slots):
    snapshots = slots.own()
    snapshots.capture_now(0)
    want = draws()
    snapshots.restore(0)
    assert draws() == want
    snapshots.close()
    snapshots.close()


def test_a_wrapped_module_has_the_names_of_the_module(slots):
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._orig_mod = module

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    snapshots = slots.own(protect={"model": Wrapped(model)})
    snapshots.capture_now(0)
    assert "model/0.weight" in slots.tensors(0)
    assert digest(model.state_dict()) == digest(Wrapped(model)._orig_mod.state_dict())


def test_a_sparse_gradient_is_refused_if_a_later_step_may_use_it(slots):
    rows = nn.Embedding(50, 3, sparse=True)
    optimizer = torch.optim.SGD(rows.parameters(), lr=0.1)
    snapshots = slots.own(protect={"rows": rows, "optimizer": optimizer})
    rows(torch.tensor([1, 1, 7])).sum().backward()
    with pytest.raises(ScriptError, match=r"sparse gradient of shape \[50, 3\]"):
        snapshots.capture_now(3)
    optimizer.zero_grad()
    assert snapshots.capture_now(3)


def test_a_small_state_is_copied_at_once(slots, copied, request):
    """After the first capture, which shows its size. Then no thread has to be waited for."""
    model = nn.Linear(4, 4)
    snapshots = slots.own(protect={"model": model})
    snapshots.capture_now(0)
    at_once = request.node.callspec.params["copied"] == "at once"
    with snapshots.copy_thread._changed if at_once else contextlib.nullcontext():  # the thread can do nothing
        snapshots.begin(1)
        assert (1 in snapshots.held()) or not at_once
    snapshots.wait()
    assert snapshots.held() == (0, 1)


def test_an_error_of_a_small_capture_is_raised_when_it_is_waited_for(slots, copied):
    class Own:
        """A protected object whose state becomes one that no snapshot can hold."""

        state = 1

        def state_dict(self):
            return {"state": self.state}

        def load_state_dict(self, state):
            self.state = state["state"]

    own = Own()
    snapshots = slots.own(protect={"own": own})
    snapshots.capture_now(0)
    own.state = threading.Lock
    snapshots.begin(1)
    with pytest.raises(ScriptError, match="own"):
        snapshots.wait()
    own.state = 2
    snapshots.capture_now(2)
    assert snapshots.held() == (0, 2)
