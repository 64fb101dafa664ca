"""Behaviours of the library for collectives on GPUs that repairs rely on, each as a short program of two ranks.

    python -m deadpool_run.worker.check.conformance NAME RANK PORT [LISTENER]

`doctor --gpu` starts both ranks; rank 0 serves their store on the descriptor LISTENER, until its standard input ends. The exit
code is 0 if the behaviour was seen. The tests run the same programs on a fake device. docs/gpu.md names the source of each.
"""

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.device import choose
from deadpool_run.worker.groups.backend import install
from deadpool_run.worker.groups.registry import GroupState, Registry
from deadpool_run.worker.transcript.transcript import Transcript

SIZE = 2
_Result = TypeVar("_Result")
TIMEOUT = timedelta(seconds=30)
_DEVICE_S = 20.0
_LATER_S = 0.3
_LARGE = 1 << 16
_RECOVERIES = 20
_GROWTH = 64 << 20
"""Less than the communicators of a few repairs have."""


class ConformanceError(AssertionError):
    """The library behaved otherwise."""


class ConformanceRank:
    """This process, as one of the ranks of a program."""

    def __init__(self, rank: int, store: Store, *, size: int = SIZE, prefix: str = "e1") -> None:
        self.rank, self.size, self.store, self.prefix = rank, size, store, prefix
        self.failures: list[str] = []
        self.new_registry()

    def new_registry(self) -> None:
        """Forget all groups, as a new process."""
        page = StatusPage(create_status_page(1), 1)
        self.registry = Registry(rank_entry=page.rank_entries[0], on_failure=self.failures.append)

    def start(self, *, attached: bool = True, timeout: timedelta = TIMEOUT) -> None:
        """Create the world, of ranks that are connected, or of one that rehearses. `timeout` is that of its collectives."""
        install(self.registry, store=c10d.clone_store(self.store), prefix=self.prefix, attached=attached)
        own = PrefixStore(f"torch{os.getpid()}", self.store)
        dist.init_process_group("deadpool", store=own, rank=self.rank, world_size=self.size, timeout=timeout)
        wanted = GroupState.ATTACHED if attached else GroupState.REHEARSING
        _same("state of the groups", self.registry.state, wanted)
        if attached:
            self.meet("started")  # otherwise a rank's first action may break a connection that its peer still makes

    def meet(self, name: str, count: int | None = None) -> None:
        """Wait here for all ranks, or for so many."""
        if self.store.add(f"meet/{name}", 1) == (count or self.size):
            self.store.set(f"met/{name}", "1")
        self.store.wait([f"met/{name}"], TIMEOUT)


def barrier(peer: ConformanceRank, place: torch.device) -> None:
    """Run barriers, with and without a device, and abort one for which the host waits."""
    peer.start()
    number = place.index or 0
    dist.barrier(device_ids=[number])
    _wait(dist.barrier(device_ids=[number], async_op=True))
    dist.barrier()
    _require("a barrier counts as a lost peer", not peer.registry.step_failed and not peer.failures)
    peer.meet("ready")
    peer.registry.begin_step()
    if peer.rank == 0:
        with later(_LATER_S, peer.registry.abort):
            dist.barrier(device_ids=[number])
        _require("the host did not wait for a barrier", peer.registry.step_failed)
    peer.registry.abort()
    peer.registry.attach(peer.store, "e2", TIMEOUT)
    _same("sum after the repair", _sum(place), 2)


def recorded(peer: ConformanceRank, place: torch.device) -> None:
    """Issue collectives of each kind, and play them again from the transcript."""
    got, again = played_again(peer, lambda: _set_up(peer, place))
    _same("received", got, [[7, 0], [1 - peer.rank, 5], [3], [3]])
    _same("received from the transcript", again, got)


def played_again(peer: ConformanceRank, calls: Callable[[], _Result]) -> tuple[_Result, _Result]:
    """Return the results of these calls, and those of a rehearsal that gets them from the transcript."""
    peer.registry.recording = Transcript()
    peer.start()
    got = calls()
    transcript = peer.registry.recording.to_bytes()
    peer.registry.recording = None
    peer.registry.shut_down()
    dist.destroy_process_group()
    peer.new_registry()
    peer.registry.playback = played = Transcript.from_bytes(transcript)
    peer.start(attached=False)
    again = calls()
    found = played.misses, played.left
    _require(f"not in the transcript, and left of it: {found}; {played.first_miss}", found == (0, 0))
    return got, again


def _set_up(peer: ConformanceRank, place: torch.device) -> list[list[int]]:
    other = 1 - peer.rank
    seed = torch.tensor([7 + 10 * peer.rank, peer.rank], device=place)
    dist.broadcast(seed, src=0)
    theirs = torch.zeros(2, dtype=torch.long, device=place)
    mine = torch.tensor([peer.rank, 5], device=place)
    for work in distributed_c10d.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    ):
        work.wait()
    total = torch.tensor([peer.rank + 1], device=place)
    _wait(dist.all_reduce(total, async_op=True))
    dist.barrier(device_ids=[place.index or 0])
    last = torch.tensor([3 * (1 - peer.rank)], device=place)
    dist.broadcast(last, src=0)
    return [seed.tolist(), theirs.tolist(), total.tolist(), last.tolist()]


def stuck(peer: ConformanceRank, place: torch.device) -> None:
    """Abort three communicators whose collectives wait for the other rank."""
    peer.start()
    groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 1])]
    _sum(place)
    peer.meet("ready")
    peer.registry.begin_step()
    if peer.rank == 0:
        works = [dist.all_reduce(_full(place, 1), group=group, async_op=True) for group in groups]
        with later(_LATER_S, peer.registry.abort):
            for work in works:
                _wait(work)
            _require("the device is still stuck after the abort", _is_done())
    peer.registry.abort()
    _require("the step did not fail", peer.registry.step_failed)
    peer.registry.attach(peer.store, "e2", TIMEOUT)
    peer.registry.begin_step()
    totals = [_sum(place)]
    for group in groups[1:]:
        dist.all_reduce(tensor := _full(place, 2), group=group)
        totals.append(tensor[0].item())
    _same("sums after the repair", totals, [2, 4, 4])


def coalescing(peer: ConformanceRank, place: torch.device) -> None:
    """Abort in the middle of a coalescing, and leave one open."""
    peer.start()
    _sum(place)
    peer.meet("ready")
    other = 1 - peer.rank
    with c10d.coalescing(dist.group.WORLD, place, async_ops=True) as manager:
        dist.isend(_full(place, 1), other)
        thread = threading.Thread(target=peer.registry.abort)
        thread.start()
        thread.join()
        dist.irecv(_full(place, 1), other)
    manager.wait()
    peer.meet("aborted")
    peer.registry.attach(peer.store, "e2", TIMEOUT)
    first = _sum(place)
    peer.registry.abort()
    peer.registry.attach(peer.store, "e3", TIMEOUT)
    left = c10d.coalescing(dist.group.WORLD, place)
    left.__enter__()  # an exception of the script: torch does not end the coalescing then
    dist.isend(_full(place, 1), other)
    peer.registry.abort()
    peer.registry.attach(peer.store, "e4", TIMEOUT)
    _same("sums after two repairs", [first, _sum(place)], [2, 2])


def ends_first(peer: ConformanceRank, place: torch.device) -> None:
    """Have rank 0 end while a collective of both runs."""
    peer.start()
    _sum(place)
    tensor = _full(place, peer.rank + 1, _LARGE)
    if peer.rank == 0:
        dist.all_reduce(tensor, async_op=True)
        peer.store.set("issued", "1")
        peer.registry.shut_down()
        return
    peer.store.wait(["issued"], TIMEOUT)
    threading.Event().wait(_LATER_S)
    _wait(dist.all_reduce(tensor, async_op=True))
    _same("the sum's least and largest element", [tensor.min().item(), tensor.max().item()], [3, 3])


def recovers_often(peer: ConformanceRank, place: torch.device) -> None:
    """Repair twenty times, and look for memory of past epochs."""
    peer.start()
    tensors, free = [], []
    for epoch in range(2, 2 + _RECOVERIES):
        tensor = _full(place, 1, _LARGE)
        tensors.append(weakref.ref(tensor))
        dist.all_reduce(tensor, async_op=True)  # nobody waits for it, as after an abort
        del tensor
        peer.meet(f"issued{epoch}")
        peer.registry.abort()
        peer.registry.attach(peer.store, f"e{epoch}", TIMEOUT)
        free.append(torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else 0)
    gc.collect()
    _same("tensors of past epochs", sum(tensor() is not None for tensor in tensors), 0)
    grown = free[1] - free[-1]
    _require(f"{grown} bytes of GPU memory were not freed in {_RECOVERIES} repairs", grown < _GROWTH)


def lost_peer(peer: ConformanceRank, place: torch.device) -> torch.Tensor:
    """End rank 1 in a step: the collective of rank 0 waits until the abort, and no longer. Return its output."""
    peer.start()
    _sum(place)
    peer.meet("ready")
    if peer.rank == 1:
        os._exit(0)
    peer.registry.begin_step()
    tensor = _full(place, 1)
    work = dist.all_reduce(tensor, async_op=True)
    with later(_LATER_S, peer.registry.abort) as aborted:
        _wait(work)
        _require("the device is still stuck after the abort", _is_done())
        _require("the collective ended before the abort", bool(aborted))
    _require("the step did not fail", peer.registry.step_failed)
    dist.all_reduce(after := _full(place, 1))
    _same("the fake result of a later collective", after.tolist(), [1] * 4)
    return tensor


def destroys(peer: ConformanceRank, place: torch.device) -> None:
    """Abort while rank 0 destroys a group whose collective waits for rank 1."""
    peer.start()
    group = dist.new_group([0, 1])
    _sum(place)
    if peer.rank == 0:
        dist.all_reduce(_full(place, 1), group=group, async_op=True)
        with later(_LATER_S, peer.registry.abort):
            dist.destroy_process_group(group)
        _same("state", peer.registry.state, GroupState.ABORTED)
    peer.meet("destroyed")
    peer.registry.abort()


BEHAVIOURS: Mapping[str, Callable[[ConformanceRank, torch.device], object]] = {
    each.__name__.replace("_", "-"): each
    for each in (barrier, recorded, stuck, coalescing, ends_first, recovers_often, lost_peer, destroys)
}


@contextmanager
def later(seconds: float, act: Callable[[], object]) -> Iterator[list[float]]:
    """Call `act` on another thread after `seconds`. The yielded list gets the time of the call."""
    moments: list[float] = []

    def call() -> None:
        moments.append(time.monotonic())
        act()

    timer = threading.Timer(seconds, call)
    timer.start()
    try:
        yield moments
    finally:
        timer.join()


def _full(place: torch.device, value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value), device=place)


def _sum(place: torch.device) -> float:
    """Return the sum of a one of each rank."""
    tensor = _full(place, 1)
    dist.all_reduce(tensor)
    return tensor[0].item()


def _wait(work: Any) -> None:
    work.wait()


def _is_done() -> bool:
    device = choose.device_backend()
    return device is None or device.mark().wait(_DEVICE_S)


def _require(otherwise: str, condition: bool) -> None:
    if not condition:
        raise ConformanceError(otherwise)


def _same(what: str, got: object, wanted: object) -> None:
    _require(f"{what}: {got}, not {wanted}", got == wanted)


def main(name: str, rank: int, port: int, listener: int | None = None) -> None:
    """Run this rank of a behaviour. Raises `ConformanceError` if it was another one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    device = choose.device_backend()
    _require("torch has no library for collectives on GPUs here", device is not None)
    assert device is not None
    if listener is None:
        store = c10d.open_store("127.0.0.1", port, TIMEOUT)
    else:
        store = c10d.serve_store(listener, port, TIMEOUT)
    peer = ConformanceRank(rank, store)
    BEHAVIOURS[name](peer, device.place())
    peer.registry.shut_down()
    sys.stdout.flush()
    if listener is not None:
        sys.stdin.read()
    os._exit(0)  # as our workers do: a destructor may wait for a peer that has ended


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
