"""A forked process copies the pages that an earlier one copied, and no others. The processes are forks of a small one, as a worker is."""

import subprocess
import sys

import pytest
from kit.world import LIMIT_S

COMMON = """
import json, mmap, os, socket, sys, threading
from deadpool_run.worker import prefault

PAGES = 64
memory = mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

def write(*pages):
    for page in pages:
        memory[page * mmap.PAGESIZE] = 1

def own():
    '''Return the pages of `memory` that this process has copied.'''
    start = prefault.ctypes.addressof(prefault.ctypes.c_char.from_buffer(memory))
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(start // mmap.PAGESIZE * 8)
        entries = pagemap.read(PAGES * 8)
    bits = (int.from_bytes(entries[8 * page : 8 * page + 8], sys.byteorder) for page in range(PAGES))
    return [page for page, entry in enumerate(bits) if entry >> 56 & 1]

def forked(work):
    '''Return what `work` returns in a fork, as JSON.'''
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(work()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        found = json.loads(answer.read())
    os.wait()
    return found

write(*range(PAGES))
prefault.begin()
"""


@pytest.fixture
def outcome():
    """Run a script after `COMMON`; return what it prints."""

    def run(script):
        command = [sys.executable, "-c", COMMON + script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    return run


def test_a_fork_copies_the_pages_that_the_first_one_wrote(outcome):
    script = """
def first(pages):
    write(*pages)
    prefault.mark()
    return own()

def later():
    before = own()
    return before, prefault._pages.copy(), own()

print(forked(later))
print(forked(lambda: first([3, 4, 40])))
print(forked(lambda: first([7])))
print(forked(later))
print(own() == list(range(PAGES)))
"""
    before, first, second, after, parent = outcome(script)
    assert before == "[[], False, []]", "nothing was marked yet"
    assert first == "[3, 4, 40]"
    assert second == "[7]"
    assert after == "[[], True, [3, 4, 40]]", "the marks are those of the first process"
    assert parent == "True"


def test_a_spare_copies_them_while_it_waits_and_leaves_the_order_in_its_socket(outcome):
    script = """
def first():
    write(5, 6)
    prefault.mark()

forked(first)

def spare(ours, theirs):
    def agent():
        while 5 not in own():
            os.sched_yield()
        ours.send(b"order")
    thread = threading.Thread(target=agent)
    thread.start()
    prefault.wait(theirs)
    thread.join()
    return own(), theirs.recv(16).decode()

ours, theirs = socket.socketpair()
print(forked(lambda: spare(ours, theirs)))
"""
    assert outcome(script) == ["[[5, 6], 'order']"]


def test_an_order_that_is_there_at_once_is_not_kept_waiting(outcome):
    script = """
forked(lambda: (write(5), prefault.mark())[1])

def promoted(ours, theirs):
    ours.send(b"order")
    prefault.wait(theirs)
    return own()

print(forked(lambda: promoted(*socket.socketpair())))
"""
    assert outcome(script) == ["[]"]


def test_a_process_that_was_not_forked_has_no_pages():
    script = "import socket; from deadpool_run.worker import prefault; prefault.mark(); prefault.wait(socket.socketpair()[0])"
    subprocess.run([sys.executable, "-c", script], timeout=LIMIT_S, check=True)
