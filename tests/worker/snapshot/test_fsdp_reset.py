"""The repeated step sees nothing that the interrupted step left inside FSDP2."""

import pytest
import torch
from snapshot_kit import given
from test_snapshot_sharded import RANKS, Training, _join, _on_both, _restored


@pytest.fixture
def slots(make_slots):
    return make_slots(RANKS)


class Interrupted(Exception):  # noqa: N818 - what it stands for is no error either
    pass


def _interrupt(_gradient):
    raise Interrupted


def in_forward(training):
    with training.model[2].register_forward_hook(lambda *_: _interrupt(None)), pytest.raises(Interrupted):
        training.model(torch.randn(4, 5))


def in_backward(training):
    """Between the inner module's backward and the root's: the root's end is provided for, and never comes."""
    with training.model[2].register_forward_hook(lambda _m, _i, output: output.register_hook(_interrupt) and None):
        loss = training.model(torch.randn(4, 5)).square().mean()
    with pytest.raises(Interrupted):
        loss.backward()


def not_reduced(training):
    training.model.set_requires_gradient_sync(False)
    training.model(torch.randn(4, 5)).square().mean().backward()
    training.model.set_requires_gradient_sync(True)


def not_reduced_over_replicas(training):
    training.model.set_requires_all_reduce(False)
    training.model(torch.randn(4, 5)).square().mean().backward()
    training.model.set_requires_all_reduce(True)


def _repeats(gift, rank, folder, kind, leave):
    training, snapshots, wanted = _restored(gift, rank, folder, kind)
    found = []
    for repair in (snapshots.rewind, snapshots.restore):
        leave(training)
        repair(1)
        training.step(snapshots)
        found.append(training.digest() == wanted)
        snapshots.restore(1)
    snapshots.close()
    return found


@pytest.mark.parametrize(
    ("kind", "leave"),
    [
        *(("fsdp", leave) for leave in (in_forward, in_backward, not_reduced)),
        *(("hsdp", leave) for leave in (in_backward, not_reduced_over_replicas)),
    ],
)
def test_a_repeated_step_takes_nothing_from_the_interrupted_one(slots, tmp_path, kind, leave):
    assert _on_both(slots, tmp_path / "one", _repeats, kind, leave) == [[True, True]] * RANKS


def _finds_again(gift, rank, folder):
    _join(rank, folder)
    training = Training("fsdp", 1, rank)
    _, snapshots = given(gift)
    training.protected_by(snapshots)
    training.model(torch.randn(4, 5)).square().mean().backward()
    before = [parameter.grad.to_local().clone() for parameter in training.model.parameters()]
    snapshots.protected.refresh(final=False)
    after = [parameter.grad for parameter in training.model.parameters()]
    snapshots.close()
    return all(
        gradient is not None and torch.equal(gradient.to_local(), kept)
        for gradient, kept in zip(after, before, strict=True)
    )


def test_looking_for_the_parameters_again_keeps_their_gradients(slots, tmp_path):
    assert _on_both(slots, tmp_path / "one", _finds_again) == [True, True]
