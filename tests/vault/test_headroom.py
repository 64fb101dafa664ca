"""Memory is taken only while there is room: on the machine, in the control groups, and beside what others announce."""

import os
import subprocess
import sys

import pytest
from kit.memory_group import memory_group
from kit.world import LIMIT_S

from deadpool_run.errors import NoMemoryError
from deadpool_run.vault.headroom import Growth, room
from deadpool_run.vault.status_page import StatusPage, create_status_page

MIB = 1 << 20


@pytest.fixture
def page():
    fd = create_status_page(3)
    status_page = StatusPage(fd, 3)
    yield status_page
    status_page.close()
    os.close(fd)


def room_in(group, nbytes):
    group.limit(nbytes)
    command = group.command(sys.executable, "-c", "from deadpool_run.vault.headroom import room; print(room(1))")
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout)


def test_the_limit_of_a_control_group_counts():
    with memory_group("deadpool-test-room") as group:
        small, large = room_in(group, 512 * MIB), room_in(group, 1024 * MIB)
        assert 200 * MIB < small < 320 * MIB  # less what is left to a worker, and what an interpreter uses
        assert small + 500 * MIB < large < 832 * MIB


def test_what_fits_may_be_taken_and_what_does_not_is_refused(page):
    growth = Growth(page, 1, workers=1)
    with growth.by(MIB, "a test"):
        assert page.growing == MIB
    assert page.rank_entries[1].growing == 0
    with pytest.raises(NoMemoryError, match="no memory for a test: it needs"), growth.by(1 << 60, "a test"):
        pass
    assert page.rank_entries[1].growing == -(1 << 60)
    assert page.growing == 0


def test_what_others_have_announced_is_not_free(page):
    page.rank_entries[0].growing = room(1) - 2 * MIB
    page.rank_entries[2].growing = -5  # it found no memory
    with pytest.raises(NoMemoryError), Growth(page, 1, workers=1).by(1 << 30, "a test"):
        pass


def test_a_rank_that_is_refused_may_try_again(page):
    page.rank_entries[0].growing = 1 << 60
    growth = Growth(page, 1, workers=1)
    with pytest.raises(NoMemoryError), growth.by(MIB, "a test"):
        pass
    page.rank_entries[0].growing = 0
    with growth.by(MIB, "a test"):
        assert page.rank_entries[1].growing == MIB


def test_a_limit_counts_what_snapshots_and_copies_have_and_are_about_to_take(page):
    page.memory_limit = 8 * MIB
    growth = Growth(page, 1, workers=1)
    with growth.by(2 * MIB, "a test"):
        pass
    assert page.taken == page.rank_entries[1].taken == 2 * MIB
    page.rank_entries[0].growing = MIB
    page.copies_growing, page.copies_taken = MIB, 2 * MIB
    assert page.taken == 4 * MIB
    with growth.by(2 * MIB, "a test"):
        pass
    words = "no memory for a test: it needs 1 B, and 0 B of --snapshot-memory 8.39 MB are left"
    with pytest.raises(NoMemoryError, match=words), growth.by(1, "a test"):
        pass
    page.copies_growing = page.copies_taken = 0
    with growth.by(3 * MIB, "a test"):
        pass


def test_memory_that_was_not_taken_does_not_count(page):
    page.memory_limit = 8 * MIB
    with pytest.raises(OSError, match="no pages"), Growth(page, 1, workers=1).by(MIB, "a test"):
        raise OSError("no pages")
    assert (page.taken, page.growing) == (0, 0)


def test_a_stopped_holder_of_the_lock_costs_a_snapshot_and_no_more(page):
    code = (
        "import fcntl, os, signal, sys; fd = int(sys.argv[1]); fcntl.lockf(fd, fcntl.LOCK_EX); "
        "print(1, flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    command = [sys.executable, "-c", code, str(page.fd)]
    with subprocess.Popen(command, pass_fds=[page.fd], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(NoMemoryError, match="another worker holds"), Growth(page, 1, workers=1).by(1, "a test"):
            pass
        holder.kill()
    with Growth(page, 1, workers=1).by(1, "a test"):
        pass
