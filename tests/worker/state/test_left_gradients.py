"""Gradients that a step leaves after an update: a step that reads them is exact or refused, and never wrong."""

import pytest
import torch
import torch.distributed as dist
from snapshot_kit import given, in_child
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_module, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.errors import RefusedError
from deadpool_run.worker.state.left_gradients import LeftGradients, is_watched


class Training:
    """A loop that zeroes gradients at the start of each step, as most do."""

    def __init__(self, gift, model=None, wrappers=()):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2) if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        protect = {"model": self.model, "optimizer": self.optimizer}
        _, self.snapshots = given(gift, wrappers=wrappers, protect=protect)
        self.completed = 0

    def step(self, *, to_none=True, zero=True):
        if zero:
            self.optimizer.zero_grad(set_to_none=to_none)
        self.backward()
        self.update()

    def backward(self):
        self.model(torch.full((4, 3), 1.0 + self.completed)).pow(2).sum().backward()

    def update(self):
        self.snapshots.wait()
        self.snapshots.note_optimizer(self.optimizer)
        self.optimizer.step()

    def complete(self):
        self.completed += 1
        self.snapshots.capture_now(self.completed)

    def lose(self, how="restore"):
        """Go back to the last version, as after a loss."""
        self.snapshots.rewind(self.completed) if how == "rewind" else self.snapshots.restore(self.completed)

    def gradients(self):
        return [each.grad.tolist() for each in self.model.parameters()]

    def weights(self):
        return [each.tolist() for each in self.model.parameters()]


def after_a_loss(gift, how, use):
    training = Training(gift)
    training.step()
    training.complete()
    if how == "restore":
        training.step()
    training.lose(how)
    gradient = training.model.weight.grad
    try:
        use(training, gradient)
    except RefusedError as error:
        return str(error)
    finally:
        training.snapshots.close()
    return ""


def norm(_, gradient):
    gradient.norm()


def clip(training, _):
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def copy_out(_, gradient):
    torch.zeros(2, 3).copy_(gradient)


def numbers(_, gradient):
    gradient.tolist()


def part(_, gradient):
    gradient[0].zero_()


def add_to_it(training, _):
    training.step(zero=False)


def apply_it_again(training, _):
    training.snapshots.note_optimizer(training.optimizer)


def keep_what_was_added(training, _):
    training.backward()
    training.complete()


@pytest.mark.parametrize("how", ["restore", "rewind"])
@pytest.mark.parametrize(
    "use",
    [norm, clip, copy_out, numbers, part, add_to_it, apply_it_again, keep_what_was_added],
    ids=lambda each: each.__name__,
)
def test_a_lost_gradient_that_is_used_is_refused(slots, how, use):
    assert "model/weight" in in_child(after_a_loss, slots.gift(), how, use)


def look(_, gradient):
    assert (gradient.shape, gradient.dtype, gradient.device.type) == ((2, 3), torch.float32, "cpu")
    assert gradient.is_contiguous()
    assert gradient.grad_fn is None


def zero_through_data(training, _):
    for each in training.model.parameters():
        each.grad.data.zero_()
    training.step(zero=False)


def overwrite(training, _):
    for each in training.model.parameters():
        each.grad.copy_(torch.ones(each.shape))
    training.update()


def zero_in_place(training, _):
    training.step(to_none=False)


def drop(training, _):
    training.step()


@pytest.mark.parametrize("how", ["restore", "rewind"])
@pytest.mark.parametrize(
    "use", [look, zero_through_data, overwrite, zero_in_place, drop], ids=lambda each: each.__name__
)
def test_a_lost_gradient_that_is_overwritten_is_no_matter(slots, how, use):
    assert in_child(after_a_loss, slots.gift(), how, use) == ""


def with_a_loss(gift, to_none):
    training = Training(gift)
    found = []
    for lost in (False, True):
        training.step(to_none=to_none)
        training.complete()
        before = training.weights()
        training.step(to_none=to_none)
        without = training.weights()
        if lost:
            training.lose()
            assert training.weights() == before
            training.step(to_none=to_none)
            found += [without, training.weights()]
    training.snapshots.close()
    return found


def in_a_flat_buffer(gift, copying):
    """Gradients are views, and zeroed through what they are views of: torch asks no mark."""
    training = Training(gift)
    flat, at = torch.zeros(8), 0
    for each in training.model.parameters():
        each.grad = flat[at : at + each.numel()].view_as(each)
        at += each.numel()
    found = []
    for lost in (False, True, True):
        flat.zero_()
        training.step(zero=False)
        training.complete()
        training.snapshots.protected.watch_gradients(1, copying=copying)
        flat.zero_()
        training.step(zero=False)
        without = training.weights()
        if lost:
            training.lose()
            flat.zero_()
            training.step(zero=False)
            found += [without, training.weights()]
        training.complete()
    training.snapshots.close()
    return found


@pytest.mark.parametrize("copying", [True, False])
def test_gradients_in_a_flat_buffer_are_zeroed_there(slots, copying):
    found = in_child(in_a_flat_buffer, slots.gift(), copying)
    assert found[::2] == found[1::2]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_loop_that_zeroes_first_is_repeated(slots, to_none):
    without, repeated = in_child(with_a_loss, slots.gift(), to_none)
    assert repeated == without


def kept_from_the_first_use(gift, use):
    training = Training(gift)
    training.step()
    training.complete()
    training.snapshots.protected.watch_gradients(1, copying=False)
    use(training)
    training.step(zero=False)
    training.complete()
    before = training.gradients()
    training.step()
    training.lose()
    after = training.gradients()
    training.snapshots.close()
    return before, after


def read_norm(training):
    float(training.model.weight.grad.norm())


def use_in_the_update(training):
    training.snapshots.note_optimizer(training.optimizer)


def add_before_they_are_zeroed(training):
    """As the loss of a generator does to the gradients of its discriminator."""
    training.backward()
    training.optimizer.zero_grad()


@pytest.mark.parametrize(
    "use", [read_norm, use_in_the_update, add_before_they_are_zeroed], ids=lambda each: each.__name__
)
def test_gradients_are_kept_once_a_step_has_read_those_of_the_step_before(slots, use):
    before, after = in_child(kept_from_the_first_use, slots.gift(), use)
    assert after == before


def not_read(gift):
    training = Training(gift)
    training.step()
    training.complete()
    training.snapshots.protected.watch_gradients(1, copying=False)
    training.step(to_none=False)
    training.complete()
    kinds = {type(each.grad) for each in training.model.parameters()}
    size = len(training.snapshots.values["gradients"])
    training.snapshots.close()
    return kinds, size


def test_gradients_that_nothing_reads_are_not_kept(slots):
    assert in_child(not_read, slots.gift()) == ({torch.Tensor}, 0)


def tried(gift, use):
    training = Training(gift)
    training.step()
    training.complete()
    before = training.gradients()
    training.snapshots.protected.watch_gradients(1, copying=True)
    use(training)
    training.step()
    training.lose()
    after = training.gradients()
    training.snapshots.close()
    return before, after


@pytest.mark.parametrize("use", [read_norm, add_before_they_are_zeroed], ids=lambda each: each.__name__)
def test_the_trial_puts_back_what_its_first_run_reads(slots, use):
    before, after = in_child(tried, slots.gift(), use)
    assert after == before


def made_anew(gift):
    """Restore where no gradient was: a replacement has run fewer steps, and another had none there."""
    training = Training(gift)
    training.model.bias.requires_grad_(False)
    training.step()
    training.complete()
    training.model.bias.requires_grad_(True)
    training.optimizer.zero_grad()
    training.model.bias.grad = torch.ones(2)
    training.lose()
    kinds = type(training.model.weight.grad).__name__, training.model.bias.grad
    try:
        read_norm(training)
    except RefusedError:
        return kinds
    finally:
        training.snapshots.close()
    return "read"


def test_a_gradient_that_a_process_never_had_is_refused_too(slots):
    assert in_child(made_anew, slots.gift()) == ("LeftGradient", None)


def in_buckets(gift):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(3, 2), gradient_as_bucket_view=True)
    training = Training(gift, model, [model])
    found = []
    for _ in range(3):
        training.step(to_none=False)
        training.complete()
    places = [each.grad.data_ptr() for each in model.parameters()]
    training.step(to_none=False)
    without = training.weights()
    training.lose()
    found.append([each.grad.data_ptr() for each in model.parameters()] == places)
    training.step(to_none=False)
    found.append(training.weights() == without)
    training.snapshots.close()
    dist.destroy_process_group()
    return found


def test_a_lost_gradient_stays_in_its_bucket(slots):
    assert in_child(in_buckets, slots.gift()) == [True, True]


def of_dtensors(gift):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = distribute_module(
        nn.Linear(3, 2),
        mesh,
        input_fn=lambda _, given, __: DTensor.from_local(given[0], mesh, [Replicate()]),
        output_fn=lambda _, out, __: out.to_local(),
    )
    training = Training(gift, model)
    training.step()
    training.complete()
    training.step()
    without = [each.to_local().tolist() for each in model.parameters()]
    training.lose()
    try:
        model.weight.grad.to_local()
    except RefusedError as error:
        text = str(error)
    training.step(to_none=False)
    repeated = [each.to_local().tolist() for each in model.parameters()]
    training.snapshots.close()
    dist.destroy_process_group()
    return text, repeated == without


def test_the_lost_gradient_of_a_dtensor_is_refused(slots):
    text, is_exact = in_child(of_dtensors, slots.gift())
    assert "model/weight" in text
    assert is_exact


def zeroed_in_place(gift, restored):
    """A loop that zeroes in place after its update leaves zeros, and the next step adds to them."""
    training = Training(gift)
    for _ in range(2):
        training.step(zero=False)
        training.optimizer.zero_grad(set_to_none=False)
        training.complete()
        training.snapshots.protected.watch_gradients(training.completed, copying=False)
    training.backward()
    training.update()
    without = training.weights()
    training.optimizer.zero_grad(set_to_none=False)
    if restored:
        training.lose()
    training.snapshots.protected.watch_gradients(training.completed, copying=False)
    training.backward()
    training.update()
    repeated = training.weights()
    training.complete()
    size = len(training.snapshots.values["gradients"])
    training.snapshots.close()
    return repeated == without, size


@pytest.mark.parametrize("restored", [True, False])
def test_zeros_that_a_step_leaves_are_zeros_again(slots, restored):
    assert in_child(zeroed_in_place, slots.gift(), restored) == (restored, 0)


def test_gradients_are_watched_in_the_first_steps_and_at_powers_of_two():
    assert [step for step in range(1, 600) if is_watched(step)] == [*range(1, 129), 256, 512]


def twice(gift, again):
    """Lose a gradient, overwrite it, and lose it again, in steps that are not watched; `again`, before another loss."""
    training = Training(gift)
    training.completed = 130
    for _ in range(2 + again):
        training.step()
        training.complete()
        training.lose()
    try:
        read_norm(training)
    except RefusedError as error:
        return str(error)
    finally:
        training.snapshots.close()
    return "read"


@pytest.mark.parametrize("again", [True, False])
def test_a_gradient_is_lost_in_steps_that_are_not_watched_too(slots, again):
    assert "model/weight" in in_child(twice, slots.gift(), again)


def read_after_a_write_to_its_memory():
    """A backward of DDP sets its view of a bucket: torch asks no mark."""
    left, bucket, weight = LeftGradients(), torch.zeros(4), nn.Parameter(torch.ones(4))
    weight.grad = bucket.view(4)
    left.lose(weight, "weight")
    bucket.fill_(1)
    read = weight.grad.sum().item()
    left.lose(weight, "weight")
    try:
        weight.grad.sum()
    except RefusedError:
        return read
    return None


def test_a_stand_in_that_a_backward_has_set_is_read_as_any_gradient():
    assert in_child(read_after_a_write_to_its_memory) == 4
