"""The kernel tells which memory was written, by whatever way it was."""

import mmap
import multiprocessing
import os
import resource
from collections.abc import Callable

import numpy as np
import pytest
import torch

from deadpool_run.worker.written_pages import watch

NBYTES = 3 << 20
INSIDE = 1 << 20
"""An element that is not at an edge."""


def is_possible() -> bool:
    tensor = torch.ones(NBYTES, dtype=torch.uint8)
    return watch(tensor.data_ptr(), NBYTES) is not None


pytestmark = pytest.mark.skipif(not is_possible(), reason="needs Linux 6.7 and userfaultfd(2)")


def read_from_a_pipe(tensor: torch.Tensor) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\1" * 8)
    os.readv(reader, [memoryview(tensor.numpy())[INSIDE : INSIDE + 8]])
    os.close(reader)
    os.close(writer)


def through_data(tensor: torch.Tensor) -> None:
    tensor.data[INSIDE] = 1


def through_an_array(tensor: torch.Tensor) -> None:
    np.asarray(tensor)[INSIDE] = 1


def in_place(tensor: torch.Tensor) -> None:
    tensor[INSIDE:].fill_(1)


WRITES = [read_from_a_pipe, through_data, through_an_array, in_place]


def watched(tensor: torch.Tensor) -> Callable[[], bool]:
    """Watch the tensor; return a function that returns whether nobody has written to it."""
    found = watch(tensor.data_ptr(), tensor.nbytes)
    assert found is not None
    return lambda: found.is_untouched(tensor.data_ptr(), tensor.nbytes)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen_and_does_what_it_does(write: Callable[[torch.Tensor], None]) -> None:
    tensor, expected = torch.zeros(NBYTES, dtype=torch.uint8), torch.zeros(NBYTES, dtype=torch.uint8)
    is_untouched = watched(tensor)
    assert is_untouched()
    write(tensor)
    write(expected)
    assert not is_untouched()
    assert torch.equal(tensor, expected)


def test_reading_is_no_write() -> None:
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    is_untouched = watched(tensor)
    assert int(tensor.sum()) == 0
    assert np.asarray(tensor).tobytes() == bytes(NBYTES)
    assert is_untouched()


def test_what_was_written_is_watched_again_from_the_beginning() -> None:
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    first = watched(tensor)
    through_data(tensor)
    second = watched(tensor)
    assert second()
    assert not first()
    through_an_array(tensor)
    assert not second()


def test_more_ranges_than_one_call_protects() -> None:
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    watched(tensor)
    tensor[:: 2 * mmap.PAGESIZE] += 1
    is_untouched = watched(tensor)
    assert is_untouched()
    tensor[-2 * mmap.PAGESIZE] += 1
    assert not is_untouched()


def test_the_edges_are_the_callers() -> None:
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    tensor = memory[100 : NBYTES - 100]
    found = watch(tensor.data_ptr(), tensor.nbytes)
    assert found is not None
    before, after = found.edges()
    assert (tensor.data_ptr() + before.stop) % mmap.PAGESIZE == (tensor.data_ptr() + after.start) % mmap.PAGESIZE == 0
    assert before.start == 0
    assert after.stop == tensor.nbytes
    assert before.stop < mmap.PAGESIZE
    assert after.stop - after.start < mmap.PAGESIZE
    tensor[before.stop] = 1
    assert not found.is_untouched(tensor.data_ptr(), tensor.nbytes)


def test_other_memory_is_not_the_same() -> None:
    tensor, other = torch.zeros(NBYTES, dtype=torch.uint8), torch.zeros(NBYTES, dtype=torch.uint8)
    found = watch(tensor.data_ptr(), NBYTES)
    assert found is not None
    assert not found.is_untouched(other.data_ptr(), NBYTES)
    assert not found.is_untouched(tensor.data_ptr(), NBYTES - 1)


def test_memory_that_was_mapped_again_is_not_the_same() -> None:
    with mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        memory[:] = bytes(NBYTES)
        found = watch(address, NBYTES)
        assert found is not None
        assert found.is_untouched(address, NBYTES)
        memory.madvise(mmap.MADV_DONTNEED)
        assert not found.is_untouched(address, NBYTES)


def test_memory_that_others_may_write_is_not_watched(tmp_path) -> None:
    shared = torch.zeros(NBYTES, dtype=torch.uint8).share_memory_()
    assert watch(shared.data_ptr(), NBYTES) is None
    of_file = np.memmap(tmp_path / "numbers", np.uint8, "w+", shape=NBYTES)
    assert watch(of_file.ctypes.data, NBYTES) is None


def test_a_child_may_write_to_its_copy() -> None:
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    is_untouched = watched(tensor)
    child = multiprocessing.get_context("fork").Process(target=through_data, args=(tensor,))
    child.start()
    child.join()
    child.close()
    assert is_untouched()
    through_data(tensor)
    assert not is_untouched()


def watch_without_descriptors(address: int) -> None:
    """Try to watch memory in a process that may have no further descriptors."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    os._exit(0 if watch(address, NBYTES) is None else 1)


def test_without_the_kernel_nothing_is_watched() -> None:
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    child = multiprocessing.get_context("fork").Process(target=watch_without_descriptors, args=(tensor.data_ptr(),))
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()


def test_memory_that_overlaps_is_not_untouched_because_it_was_watched_again() -> None:
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    part = tensor[: 2 * INSIDE]
    of_all = watched(tensor)
    of_part = watched(part)
    again = watched(tensor)
    through_data(tensor)
    last = watched(tensor)
    assert last()
    assert not of_part()
    assert not of_all()
    assert not again()
