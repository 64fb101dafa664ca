"""A script on torch's own Gloo groups ends only when no thread of Gloo needs the interpreter any more."""

import time

import torch
import torch.distributed as dist

from deadpool_run.worker.groups import gloo


def test_it_waits_until_a_look_and_another_find_them_idle(monkeypatch):
    looks = iter([["R", "S"], ["S", "S"], ["S", "R"], ["S", "S"], ["S", "S"], ["R", "R"]])
    monkeypatch.setattr(gloo, "_work_threads", lambda: next(looks))
    gloo.hold_until_idle(None)
    assert next(looks) == ["R", "R"]


def test_it_waits_for_a_second_at_most(monkeypatch):
    monkeypatch.setattr(gloo, "_work_threads", lambda: ["R"])
    start = time.monotonic()
    gloo.hold_until_idle(None)
    assert 1 <= time.monotonic() - start < 5


def has_a_plain_group(member):
    member.start(backend="gloo")
    dist.all_reduce(torch.ones(4))
    gloo.hold_until_idle(dist.GroupMember.WORLD)
    return sorted(gloo._work_threads())


def test_torchs_threads_are_known_by_their_name(make_world):
    for states in make_world(2).run(has_a_plain_group):
        assert states
        assert set(states) <= {"S"}
