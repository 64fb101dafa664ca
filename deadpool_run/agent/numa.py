"""`--numa-binding`: the CPUs near a rank's GPU, found in sysfs and the NVIDIA driver's files, without torch.

The modes are torchrun's. GPUs are numbered by their PCI address, as CUDA numbers GPUs of one kind.
Sources: sysfs-devices-system-cpu and sysfs-bus-pci of the kernel's ABI documentation.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from deadpool_run.errors import UsageError

_GPUS = "proc/driver/nvidia/gpus"
_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_ADVICE = "remove --numa-binding, or bind CPUs in the script"


class BindingMode(StrEnum):
    """The choice of CPUs near a GPU."""

    NODE = "node"
    """All CPUs of the GPU's NUMA node."""
    SOCKET = "socket"
    """All CPUs of the NUMA nodes of its socket."""
    EXCLUSIVE = "exclusive"
    """Its own share of the cores of its NUMA node."""
    CORE_COMPLEX = "core-complex"
    """The CPUs of one last-level cache of its NUMA node. Each GPU has another cache if there are enough."""


class Machine:
    """The CPUs and GPUs of a file system root. `allowed` are the usable CPUs, `visible` is CUDA_VISIBLE_DEVICES."""

    def __init__(self, visible: str | None, allowed: Iterable[int] | None = None, root: Path = Path("/")) -> None:
        self._root = root
        self._allowed = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
        self._gpus = self._visible(visible)

    def bind(self, mode: BindingMode, ranks: int) -> dict[int, frozenset[int]]:
        """Return the CPUs of each local rank. Raises `UsageError` if a rank has no GPU, or there is no CPU near it."""
        if ranks > len(self._gpus):
            raise UsageError(f"--numa-binding: {ranks} ranks, but {len(self._gpus)} GPUs are visible\n{_ADVICE}")
        try:
            chosen = {rank: self._cpus(mode, rank) for rank in range(ranks)}
        except (OSError, ValueError) as error:
            raise UsageError(f"--numa-binding: cannot read which CPUs are near the GPUs: {error}\n{_ADVICE}") from error
        if alone := [rank for rank, cpus in chosen.items() if not cpus]:
            raise UsageError(f"--numa-binding {mode}: no usable CPU is left for local rank {alone[0]}\n{_ADVICE}")
        return chosen

    def _visible(self, visible: str | None) -> list[str]:
        """Return the PCI addresses of the GPUs that CUDA shows, in its order."""
        folder = self._root / _GPUS
        addresses = sorted(path.name.lower() for path in folder.iterdir()) if folder.is_dir() else []
        if visible is None:
            return addresses
        by_uuid = {self._uuid(address): address for address in addresses}
        shown: list[str] = []
        for word in (part.strip() for part in visible.split(",")):
            fitting = [
                address for uuid, address in by_uuid.items() if word.startswith("GPU-") and uuid.startswith(word)
            ]
            if word.isdecimal() and int(word) < len(addresses):
                fitting = [addresses[int(word)]]
            if len(fitting) != 1:
                break  # CUDA stops at the first entry that is not a device
            shown += fitting
        return shown

    def _uuid(self, address: str) -> str:
        lines = (self._root / _GPUS / address / "information").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")), "")

    def _cpus(self, mode: BindingMode, rank: int) -> frozenset[int]:
        node = self._node_of(self._gpus[rank])
        near = self._of_node(node)
        if mode is BindingMode.NODE:
            return near
        if mode is BindingMode.SOCKET:
            return self._of_socket(node)
        neighbours = [at for at, address in enumerate(self._gpus) if self._node_of(address) == node]
        place = neighbours.index(rank)
        if mode is BindingMode.EXCLUSIVE:
            cores = _grouped(near, self._core_of)
            return frozenset().union(*_share([cores[first] for first in sorted(cores)], place, len(neighbours)))
        caches = _grouped(near, self._cache_of)
        largest_first = sorted(caches, key=lambda first: (-len(caches[first]), first))
        return caches[largest_first[place % len(largest_first)]] if largest_first else frozenset()

    def _node_of(self, address: str) -> int:
        node = int((self._root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        return max(node, 0)  # -1: the firmware does not say, as on machines with one node

    def _of_node(self, node: int) -> frozenset[int]:
        return _ranges((self._root / _NODES / f"node{node}" / "cpulist").read_text()) & self._allowed

    def _of_socket(self, node: int) -> frozenset[int]:
        nodes = _ranges((self._root / _NODES / "online").read_text())
        cpus = {each: self._of_node(each) for each in nodes}
        sockets = {each: {self._topology(cpu, "physical_package_id") for cpu in of} for each, of in cpus.items()}
        return frozenset().union(*(cpus[each] for each in nodes if sockets[each] & sockets[node]))

    def _core_of(self, cpu: int) -> int:
        return min(_ranges(self._topology(cpu, "thread_siblings_list")))

    def _topology(self, cpu: int, name: str) -> str:
        return (self._root / _CPUS / f"cpu{cpu}" / "topology" / name).read_text().strip()

    def _cache_of(self, cpu: int) -> int:
        """Return the first CPU with the same last level of cache."""
        levels = {}
        for index in (self._root / _CPUS / f"cpu{cpu}" / "cache").glob("index[0-9]*"):
            if (index / "type").read_text().strip() != "Instruction":
                levels[int((index / "level").read_text())] = (index / "shared_cpu_list").read_text()
        return min(_ranges(levels[max(levels)])) if levels else cpu


def _ranges(text: str) -> frozenset[int]:
    """Return the numbers of a list such as `0-2,4`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _grouped(cpus: Iterable[int], group: Callable[[int], int]) -> Mapping[int, frozenset[int]]:
    found: dict[int, set[int]] = {}
    for cpu in cpus:
        found.setdefault(group(cpu), set()).add(cpu)
    return {name: frozenset(members) for name, members in found.items()}


def _share(cores: Sequence[frozenset[int]], place: int, among: int) -> Sequence[frozenset[int]]:
    """Return one of `among` shares. They are equal, or the first ones have one more."""
    size, more = divmod(len(cores), among)
    start = place * size + min(place, more)
    return cores[start : start + size + (place < more)]
