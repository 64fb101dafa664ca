"""A device in a variable becomes that of the process: a replacement may use another GPU than the lost rank."""

from types import SimpleNamespace

import pytest
import torch
from kit.taken import Taken

from deadpool_run.worker.codec import TreeReader, TreeWriter, device_of, name_of_device
from deadpool_run.worker.variables.variables import Variables


@pytest.fixture
def use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return lambda device: monkeypatch.setattr(torch.cuda, "current_device", lambda: device)


def run(*, steps, taken):
    """Note devices in objects that the loop makes, restore the snapshot in `taken`, and return what a process then has."""
    variables, seen = Variables(), SimpleNamespace(last=None, by_device={})
    variables.begin()
    for _ in range(steps):
        own = torch.device("cuda", torch.cuda.current_device())
        seen.last = SimpleNamespace(own=own, others=[torch.device(name) for name in ("cpu", "cuda", "cuda:5")])
        seen.by_device = {own: 1}
    taken.append(variables.take())
    variables.put(taken[0])
    return seen.last.own, seen.last.others, seen.by_device


@pytest.mark.parametrize("rehearsed", [0, 2])
def test_the_device_of_the_lost_rank_becomes_that_of_the_replacement(use, rehearsed):
    taken, others = Taken(), [torch.device(name) for name in ("cpu", "cuda", "cuda:5")]
    for device, steps in ((3, 2), (7, rehearsed)):
        use(device)
        own = torch.device("cuda", device)
        assert run(steps=steps, taken=taken) == (own, others, {own: 1})


def test_names_of_devices(use):
    use(3)
    assert [name_of_device(torch.device(name)) for name in ("cuda:3", "cuda:0", "cpu")] == ["cuda", "cuda:0", "cpu"]
    use(7)
    assert [device_of(name) for name in ("cuda", "cuda:0", "cpu")] == list(
        map(torch.device, ("cuda:7", "cuda:0", "cpu"))
    )


def test_a_device_in_a_state_dict(use):
    use(3)
    written = TreeWriter()
    node = written.encode({"own": torch.device("cuda:3"), "other": torch.device("cuda:1")}, "state")
    use(7)
    read = TreeReader(blob=written.blobs.__getitem__, tensor=lambda *_: torch.empty(0))
    assert read.decode(node) == {"own": torch.device("cuda:7"), "other": torch.device("cuda:1")}
