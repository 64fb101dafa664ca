"""`--numa-binding`: which CPUs a rank gets, on a pretend machine, and that it does get them."""

import pytest

from deadpool_run.agent.numa import BindingMode, Machine
from deadpool_run.errors import UsageError

CPUS = 16
"""Two sockets of two NUMA nodes each; a node has four CPUs, which are two cores of two threads (n and n + 1)."""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path):
    for cpu in range(CPUS):
        base = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        first = cpu - cpu % 2
        write(base / "topology/thread_siblings_list", f"{first}-{first + 1}")
        write(base / "topology/physical_package_id", cpu // 8)
        for index, (kind, level) in enumerate((("Data", 1), ("Instruction", 9), ("Unified", 2))):
            write(base / f"cache/index{index}/type", kind)
            write(base / f"cache/index{index}/level", level)
            write(base / f"cache/index{index}/shared_cpu_list", f"{first},{first + 1}")
    for node in range(4):
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{node * 4}-{node * 4 + 3}")
    write(tmp_path / "sys/devices/system/node/online", "0-3")
    for gpu, node in enumerate((0, 0, 2, -1)):
        address = f"0000:{gpu + 10:02x}:00.0"
        write(tmp_path / "proc/driver/nvidia/gpus" / address / "information", f"Model: x\nGPU UUID: \t GPU-{gpu}abc")
        write(tmp_path / "sys/bus/pci/devices" / address / "numa_node", node)
    return tmp_path


def bound(root, mode, ranks, visible=None, allowed=range(CPUS)):
    return {rank: sorted(cpus) for rank, cpus in Machine(visible, allowed, root).bind(BindingMode(mode), ranks).items()}


def test_the_cpus_of_a_node(root):
    assert bound(root, "node", 4) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 2: [8, 9, 10, 11], 3: [0, 1, 2, 3]}


def test_the_cpus_of_a_socket(root):
    assert bound(root, "socket", 3) == {0: [*range(8)], 1: [*range(8)], 2: [*range(8, 16)]}


def test_cores_are_shared_out(root):
    assert bound(root, "exclusive", 2, "0,1") == {0: [0, 1], 1: [2, 3]}
    assert bound(root, "exclusive", 1, "2") == {0: [8, 9, 10, 11]}
    assert bound(root, "exclusive", 2, "0,1", allowed=range(1, 4)) == {0: [1], 1: [2, 3]}
    with pytest.raises(UsageError, match="no usable CPU is left for local rank 3"):
        bound(root, "exclusive", 4)  # three GPUs near a node of two cores


def test_a_last_level_cache_each(root):
    assert bound(root, "core-complex", 4) == {0: [0, 1], 1: [2, 3], 2: [8, 9], 3: [0, 1]}
    assert bound(root, "core-complex", 1, allowed=range(1, 16)) == {0: [2, 3]}  # more CPUs are better


@pytest.mark.parametrize("visible", ["2,0", "GPU-2,GPU-0", "2,GPU-0ab", "2,0,-1,1", "2,0,GPU-9,1"])
def test_gpus_are_those_that_cuda_shows(root, visible):
    assert bound(root, "node", 2, visible) == {0: [8, 9, 10, 11], 1: [0, 1, 2, 3]}
    with pytest.raises(UsageError, match="3 ranks, but 2 GPUs"):
        bound(root, "node", 3, visible)


def test_a_machine_that_does_not_say(root, tmp_path):
    (root / "sys/devices/system/node/node2/cpulist").unlink()
    with pytest.raises(UsageError, match="cannot read which CPUs are near"):
        bound(root, "node", 3)
    with pytest.raises(UsageError, match="1 ranks, but 0 GPUs"):
        bound(tmp_path / "nothing", "node", 1)
