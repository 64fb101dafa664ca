"""A process restores bit for bit, generators included, the snapshot that another one captured."""

import copy
import enum
import http
import os
import random
import re
import threading
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import eight_bits
from kit.world import LIMIT_S
from snapshot_kit import Training, digest, draws, given, in_child, seed
from torch import nn

from deadpool_run.errors import ScriptError, SnapshotError
from deadpool_run.vault import segments
from deadpool_run.vault.segments import whole_pages
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.worker.snapshot import slot_memory

pytestmark = pytest.mark.usefixtures("copied")


def captures(gift, optimizer, steps):
    """Train, capture every step; return the digests after `steps` and after one more."""
    training = Training(1, optimizer=optimizer)
    _, snapshots = given(gift)
    training.protected_by(snapshots)
    snapshots.capture_now(0)
    for version in range(1, steps + 1):
        training.step(snapshots)
        snapshots.begin(version)
    then = training.digest()
    training.step(snapshots)
    later = training.digest(), draws()
    snapshots.close()
    return then, later


def restores(gift, optimizer, version, rehearsal):
    """Come to the same state from another seed; return the same digests."""
    training = Training(2, optimizer=optimizer)
    for _ in range(rehearsal):
        training.step()
    _, snapshots = given(gift)
    training.protected_by(snapshots)
    snapshots.restore(version)
    then = training.digest()
    training.step(snapshots)
    later = training.digest(), draws()
    held = snapshots.held()
    snapshots.close()
    return then, later, held


@pytest.mark.parametrize(
    ("optimizer", "rehearsal"),
    [
        ("adamw", 0),
        ("adamw", 2),
        ("sgd", 0),
        ("rmsprop", 2),
        ("adafactor", 0),
        ("lbfgs", 2),
        ("eight bits", 0),
        ("eight bits", 2),
    ],
)
def test_another_process_goes_on_bit_for_bit(slots, optimizer, rehearsal):
    then, later = in_child(captures, slots.gift(), optimizer, 4)
    assert in_child(restores, slots.gift(), optimizer, 4, rehearsal) == (then, later, (3, 4))


def cannot_restore(gift, version):
    """Return the error of a process that does not have the class of the state's tensors."""
    training = Training(2, optimizer="eight bits")
    training.optimizer = torch.optim.SGD(training.model.parameters())
    _, snapshots = given(gift)
    training.protected_by(snapshots)
    del eight_bits.Coded
    with pytest.raises(SnapshotError) as raised:
        snapshots.restore(version)
    snapshots.close()
    return str(raised.value)


def test_tensors_of_a_class_that_a_process_lacks_are_refused_by_name(slots):
    in_child(captures, slots.gift(), "eight bits", 2)
    assert in_child(cannot_restore, slots.gift(), 2) == (
        "an optimizer's state has tensors of the class kit.eight_bits.Coded, which this process does not have.\n"
        "Import it before job.protect()."
    )


def test_a_predecessors_slots_are_mapped_before_they_are_needed(slots, monkeypatch):
    monkeypatch.setattr(slot_memory, "_SMALL_BYTES", 1)
    in_child(captures, slots.gift(), "adamw", 4)
    snapshots = slots.own()
    for thread in threading.enumerate():
        if thread.name == "deadpool-map":
            thread.join(LIMIT_S)
    sizes = [whole_pages(os.fstat(fd).st_size) for fd in slots.fds[0]]
    assert [mapped_and_resident(f"memfd:deadpool-0-{slot} ") for slot in range(2)] == [(size, size) for size in sizes]
    snapshots.close()
    assert [mapped_and_resident(f"memfd:deadpool-0-{slot} ") for slot in range(2)] == [(0, 0), (0, 0)]


def test_small_slots_are_mapped_without_threads(slots):
    in_child(captures, slots.gift(), "adamw", 4)
    before = threading.enumerate()
    snapshots = slots.own()
    assert {thread.name for thread in threading.enumerate() if thread not in before} == {"deadpool-copy"}
    assert mapped_and_resident("memfd:deadpool-0-") == (0, 0)
    snapshots.close()


def mapped_and_resident(name):
    """How many bytes of this process's mappings of a file there are, and how many of those have pages."""
    found, inside = {"Size": 0, "Rss": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if " " in key:  # the head of a mapping
            inside = name in line
        elif inside and key in found:
            found[key] += int(value.split()[0]) << 10
    return found["Size"], found["Rss"]


def test_a_restore_can_go_back_before_the_optimizer_had_state(slots):
    training = Training(1)
    snapshots = training.protected_by(slots.own())
    snapshots.capture_now(0)
    before = training.digest()
    training.step(snapshots)
    assert training.digest() != before
    snapshots.restore(0)
    assert not training.optimizer.state
    assert training.digest() == before


def test_a_survivor_restores_a_version_that_its_agent_has_fetched_into_its_slots(slots):
    training = Training(1)
    snapshots = training.protected_by(slots.own())
    rank_entry, fds = slots.status_page.rank_entries[0], slots.fds[0]
    snapshots.capture_now(0)
    before = training.digest()
    fetched = Path(f"/proc/self/fd/{fds[rank_entry.slots.index(0)]}").read_bytes()
    for version in (1, 2):
        training.step(snapshots)
        snapshots.capture_now(version)
    assert snapshots.held() == (1, 2)
    slot = rank_entry.slots.index(1)
    os.pwrite(fds[slot], fetched, 0)
    rank_entry.set_slot(slot, 0)
    segments.mark_empty(fds[1 - slot])
    rank_entry.set_slot(1 - slot, EMPTY)
    training.step(snapshots)
    snapshots.restore(0)
    assert training.digest() == before
    training.step(snapshots)
    assert snapshots.capture_now(1)
    assert snapshots.held() == (0, 1)


def test_a_restore_removes_state_that_the_snapshot_does_not_have(slots):
    training = Training(1)
    snapshots = training.protected_by(slots.own())
    training.step()
    snapshots.capture_now(1)
    first = training.model[5].weight
    training.optimizer.state[first]["extra"] = torch.ones(3)
    training.optimizer.state[first]["note"] = "x"
    snapshots.restore(1)
    assert set(training.optimizer.state[first]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


class Outer(torch.optim.SGD):
    """Leaves the updates to an inner optimizer, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, lr=0.1)
        self.optim = torch.optim.Adam(parameters, lr=0.1)

    def step(self):
        self.optim.step()


def test_the_state_of_an_inner_optimizer_is_made_and_removed(slots):
    model = nn.Linear(2, 2)
    outer = Outer(model.parameters())
    snapshots = slots.own()
    snapshots.protect("model", model)
    snapshots.protect("optimizer", outer)
    snapshots.capture_now(0)
    model(torch.ones(3, 2)).sum().backward()
    outer.step()
    snapshots.capture_now(1)
    want = digest(model.state_dict(), outer.optim.state_dict())
    snapshots.restore(0)
    assert not outer.optim.state
    snapshots.restore(1)
    assert digest(model.state_dict(), outer.optim.state_dict()) == want
    assert not outer.state
    snapshots.close()


def test_tensor_objects_stay_the_same(slots):
    training = Training(1)
    snapshots = training.protected_by(slots.own())
    training.step()
    snapshots.capture_now(1)
    held = [*training.model.parameters(), *training.model.buffers()]
    state = [value for values in training.optimizer.state.values() for value in values.values()]
    training.step(snapshots)
    snapshots.restore(1)
    assert all(a is b for a, b in zip(held, [*training.model.parameters(), *training.model.buffers()], strict=True))
    now = [value for values in training.optimizer.state.values() for value in values.values()]
    assert all(a is b for a, b in zip(state, now, strict=True))


class Odd(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self):
        super().__init__()
        base = torch.randn(6, 4)
        self.tied = nn.Parameter(torch.randn(3))
        self.again = self.tied
        self.brief = nn.Parameter(torch.randn(7).bfloat16())
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.scalar = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(base.t())
        self.part = nn.Parameter(base[::2, 1:3])
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("none", None)
        self.register_buffer("view", base[0, 1:3], persistent=False)
        self.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_odd_tensors_come_back(slots):
    seed(1)
    one = Odd()
    one.calls = 5
    snapshots = slots.own(protect={"odd": one})
    snapshots.capture_now(0)
    seed(2)
    with torch.no_grad():
        other = Odd()
    snapshots.close()
    theirs = slots.own(protect={"odd": other})
    theirs.restore(0)
    theirs.close()
    pairs = [*zip(one.parameters(), other.parameters(), strict=True), *zip(one.buffers(), other.buffers(), strict=True)]
    assert all(digest(a) == digest(b) for a, b in pairs)
    assert other.calls == 5
    names = set(slots.tensors(0))
    assert "odd/tied" in names
    assert "odd/again" not in names


class Holder:
    """A user's object with a state of any kind."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Norm(enum.IntEnum):
    """A setting in an optimizer's groups, as pytorch_optimizer has."""

    SPECTRAL = 0
    SIGN = 1


PLAIN = {
    "none": None,
    "numbers": [1, -(2**80), 0.1, float("inf"), -0.0, True],
    "text": "ü\n",
    "bytes": b"\x00\xff",
    "pair": (1, ("a", [2])),
    "by number": {1: "a", (2, 3): "b", None: "c"},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "a tag": {"!": "tensor", "at": 0},
    "complex": complex(1.5, float("-inf")),
    "set": {1, 2},
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "the last ones": deque([1, deque([2])], 3),
    "member": [Norm.SPECTRAL, http.HTTPStatus.OK, {"by": Norm.SIGN}],
}


def test_plain_values_come_back(slots):
    holder = Holder(PLAIN)
    snapshots = slots.own(protect={"holder": holder})
    snapshots.capture_now(0)
    holder.state = None
    snapshots.restore(0)
    snapshots.close()
    assert holder.state == PLAIN
    assert {key: type(value) for key, value in holder.state.items()} == {k: type(v) for k, v in PLAIN.items()}


def test_tensors_and_arrays_in_values_come_back(slots):
    turned = torch.randn(4, 3).t()
    state = {
        "tensors": [turned, torch.tensor(7), torch.zeros(0), deque([torch.ones(2)], 3)],
        "array": np.arange(6, dtype=np.uint64).reshape(2, 3),
        "scalar": np.float32(1.5),
        "parameter": nn.Parameter(torch.ones(2)),
        "generator": np.random.default_rng(5).bit_generator.state,
    }
    want = {key: value for key, value in state.items() if key in ("array", "scalar", "generator")}
    holder = Holder(state)
    snapshots = slots.own(protect={"holder": holder})
    snapshots.capture_now(0)
    kept = digest(state["tensors"])
    turned.add_(1)  # what was captured is not the live tensor
    holder.state = None
    snapshots.restore(0)
    snapshots.close()
    assert digest(holder.state["tensors"]) == kept
    assert holder.state["array"].dtype == np.uint64
    assert holder.state["array"].tolist() == want["array"].tolist()
    assert type(holder.state["scalar"]) is np.float32
    assert holder.state["generator"] == want["generator"]
    assert torch.equal(holder.state["parameter"], torch.ones(2))


class Opaque:
    __slots__ = ("n",)


def test_a_value_that_would_need_pickle_is_the_scripts_fault(slots):
    snapshots = slots.own()
    holder = Holder({"a": [1]})
    snapshots.protect("thing", holder)
    holder.state = {"a": [Opaque()]}
    with pytest.raises(ScriptError, match=r"the state of 'thing' .*\.a\[0\] is a .*Opaque.*never pickled"):
        snapshots.capture_now(0)
    assert snapshots.held() == ()


def test_several_flags_together_have_no_name(slots):
    snapshots = slots.own()
    holder = Holder({"flags": re.IGNORECASE})
    snapshots.protect("thing", holder)
    holder.state = {"flags": re.IGNORECASE | re.MULTILINE}
    with pytest.raises(ScriptError, match=r"\.flags is a re\.RegexFlag"):
        snapshots.capture_now(0)


def test_a_member_that_this_process_does_not_have_is_refused(slots, monkeypatch):
    snapshots = slots.own(protect={"thing": Holder({"norm": Norm.SIGN})})
    snapshots.capture_now(0)
    monkeypatch.setitem(globals(), "Norm", enum.IntEnum("Norm", {"SPECTRAL": 0}))
    with pytest.raises(SnapshotError, match=r"Norm\.SIGN, and this process has no such member"):
        snapshots.restore(0)


@pytest.mark.parametrize("obj", [3, None, torch.zeros(1), object()])
def test_only_what_has_state_can_be_protected(slots, obj):
    snapshots = slots.own()
    with pytest.raises(ScriptError, match="has no state_dict"):
        snapshots.protect("thing", obj)


def test_a_name_is_used_once(slots):
    snapshots = slots.own(protect={"model": nn.Linear(1, 1)})
    with pytest.raises(ScriptError, match="'model' is protected already"):
        snapshots.protect("model", nn.Linear(1, 1))


def _net(**changes):
    sizes = {"width": 4, "dtype": torch.float32, "norm": True, "groups": 1} | changes
    layers = [nn.Linear(3, sizes["width"], dtype=sizes["dtype"])]
    if sizes["norm"]:
        layers.append(nn.BatchNorm1d(4))
    model = nn.Sequential(*layers)
    parameters = list(model.parameters())
    groups = [{"params": parameters}] if sizes["groups"] == 1 else [{"params": [p]} for p in parameters]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"width": 5}, r"model/0\.weight: has shape \(5, 3\) here, \(4, 3\) in the snapshot"),
        ({"dtype": torch.float64}, r"model/0\.bias: has dtype float64 here, float32 in the snapshot"),
        ({"norm": False}, r"model/1\.running_mean: in the snapshot only"),
        ({"groups": 2}, r"optimizer: 4 groups here and 1 in the snapshot"),
    ],
)
def test_a_snapshot_of_other_objects_is_refused_before_anything_changes(slots, changes, says):
    model, optimizer = _net()
    snapshots = slots.own(protect={"model": model, "optimizer": optimizer})
    snapshots.capture_now(0)
    snapshots.close()
    model, optimizer = _net(**changes)
    before = digest(model.state_dict())
    theirs = slots.own(protect={"model": model, "optimizer": optimizer})
    with pytest.raises(SnapshotError, match=says):
        theirs.restore(0)
    assert digest(model.state_dict()) == before


def test_other_names_are_refused(slots):
    snapshots = slots.own(protect={"scheduler": Holder({})})
    snapshots.capture_now(0)
    snapshots.close()
    theirs = slots.own(protect={"schedule": Holder({})})
    with pytest.raises(SnapshotError) as refused:
        theirs.restore(0)
    assert "schedule: not in the snapshot" in str(refused.value)
    assert "scheduler: in the snapshot only" in str(refused.value)


def test_a_version_that_no_slot_holds_is_refused(slots):
    snapshots = slots.own()
    snapshots.capture_now(0)
    with pytest.raises(SnapshotError, match="no slot holds snapshot 3"):
        snapshots.restore(3)


def test_generators_are_protected_without_asking(slots):
    seed(3)
    draws()  # leaves a cached half of a pair in python's and numpy's gaussian generators
    snapshots = slots.own()
    snapshots.capture_now(0)
    want = [draws() for _ in range(3)]
    seed(4)
    snapshots.restore(0)
    assert [draws() for _ in range(3)] == want


def test_optimizers_share_a_model(slots):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loose = torch.ones(3, requires_grad=True)
    one = torch.optim.AdamW(model[0].parameters())
    other = torch.optim.SGD([*model[1].parameters(), loose], lr=0.1, momentum=0.9)
    snapshots = slots.own()
    for name, obj in {"one": one, "other": other, "model": model}.items():
        snapshots.protect(name, obj)
    for _ in range(2):
        (model(torch.randn(3, 2)).sum() * loose.sum()).backward()
        one.step()
        other.step()
    snapshots.capture_now(2)
    want = digest(model.state_dict(), one.state_dict(), other.state_dict(), loose)
    one.step()
    other.step()
    assert digest(model.state_dict(), one.state_dict(), other.state_dict(), loose) != want
    snapshots.restore(2)
    assert digest(model.state_dict(), one.state_dict(), other.state_dict(), loose) == want


def test_a_rate_that_is_a_tensor_stays_that_tensor(slots):
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    snapshots = slots.own(protect={"optimizer": optimizer})
    snapshots.capture_now(0)
    rate.fill_(0.25)
    snapshots.restore(0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    random.seed()


def test_a_variable_and_an_optimizer_share_tensors_after_a_restore(slots):
    """`load_state_dict()` of an optimizer takes over the tensors of the variable."""
    snapshots = slots.own()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)
    kept, average = None, None
    snapshots.find_variables()

    def step(number):
        nonlocal kept, average
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            optimizer.load_state_dict(kept := copy.deepcopy(optimizer.state_dict()))
            average = optimizer.state[model.weight]["exp_avg"]
        snapshots.begin(number + 1)
        snapshots.wait()

    for number in range(3):
        step(number)
    expected = average.clone()
    step(3)
    snapshots.restore(3)
    live = optimizer.state[model.weight]["exp_avg"]
    assert kept["state"][0]["exp_avg"] is average is live
    assert torch.equal(average, expected)
    del kept["state"][0], average
