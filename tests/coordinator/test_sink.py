"""A sink that stalls, fails or is slow: what its callers see, and what is in the file afterwards. The stalls are real ones."""

import errno
import fcntl
import os
import pty
import select
import termios
import threading

import pytest

from deadpool_run.coordinator.sink import Sink, Stream

MAX_BYTES = 10_000
PIPE_BYTES = 4096


@pytest.fixture
def sink():
    made = Sink("test-sink", MAX_BYTES)
    yield made
    assert made.close(20)


class Pipe:
    """A pipe that holds one page, and that nobody reads."""

    def __init__(self):
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read(self):
        """Return what is there, and close the reading end if that was all."""
        found = b""
        while True:
            try:
                data = os.read(self.reader, 1 << 16)
            except BlockingIOError:
                os.set_blocking(self.reader, True)
                continue
            if not data:
                os.close(self.reader)
                return found
            found += data


def notice(count):
    return b"(%d lines dropped)\n" % count


def fill(stream, fd=None):
    """Put lines until one is dropped; return those that were taken. With a descriptor, until it takes no more itself."""
    taken = []

    def put():
        line = b"%05d\n" % len(taken)
        if done := stream.put(line):
            taken.append(line)
        return done

    for _ in range(2 * PIPE_BYTES // 6):
        assert put()
    while fd is not None and select.select([], [fd], [], 0)[1]:
        os.sched_yield()
    while put():
        pass
    return b"".join(taken)


def read_in_thread(pipe):
    found = []
    thread = threading.Thread(target=lambda: found.append(pipe.read()))
    thread.start()
    return lambda: (thread.join(20), found[0])[1]


def test_everything_is_written_in_order(sink, tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    streams = [Stream(sink, lambda path=path: os.open(path, os.O_WRONLY | os.O_CREAT)) for path in files]
    expected = [b"", b""]
    for number in range(5000):
        which = number % 3 % 2
        assert streams[which].put(b"%d\n" % number, patience_s=20)
        expected[which] += b"%d\n" % number
    for stream in streams:
        stream.close()
    assert sink.close(20)
    assert [path.read_bytes() for path in files] == expected


def test_a_pipe_that_nobody_reads_costs_lines_and_their_number_is_in_their_place(sink):
    pipe = Pipe()
    stream = Stream(sink, lambda: pipe.writer, notice=notice)
    taken = fill(stream, pipe.writer)
    for _ in range(9):
        assert not stream.put(b"lost\n")
    assert stream.dropped == 10
    result = read_in_thread(pipe)
    while not sink.is_empty:
        os.sched_yield()
    assert stream.put(b"later\n")
    stream.close()
    assert result() == taken + b"(10 lines dropped)\nlater\n"


def test_the_number_of_dropped_lines_is_at_the_end_if_no_line_follows(sink):
    pipe = Pipe()
    stream = Stream(sink, lambda: pipe.writer, notice=notice)
    taken = fill(stream, pipe.writer)
    stream.close()
    assert read_in_thread(pipe)() == taken + b"(1 lines dropped)\n"


def test_a_fifo_without_a_reader_stalls_its_sink_only(sink, tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    stream = Stream(sink, lambda: os.open(path, os.O_WRONLY))
    taken = fill(stream)
    assert stream.dropped == 1
    assert not sink.close(0)
    reader = os.open(path, os.O_RDONLY)
    with os.fdopen(reader, "rb") as file:
        assert file.read(len(taken)) == taken
        stream._close()  # the sink takes nothing more


def test_a_terminal_whose_output_is_stopped_stalls_its_sink_only(sink):
    """As after Ctrl-S."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    termios.tcflow(theirs, termios.TCOOFF)
    stream = Stream(sink, lambda: theirs, owned=False)
    taken = fill(stream, theirs)
    termios.tcflow(theirs, termios.TCOON)
    found = b""
    while len(found) < len(taken):
        found += os.read(ours, 1 << 16)
    assert found == taken
    assert sink.close(20)
    os.close(ours)
    os.close(theirs)


def test_who_waits_for_room_loses_nothing_to_a_slow_sink_and_waits_once_for_a_stalled_one(sink):
    pipe = Pipe()
    stream = Stream(sink, lambda: pipe.writer)
    taken = 0
    while stream.put(bytes(100), patience_s=0.5):
        taken += 1
    assert taken * 100 <= MAX_BYTES // 2 + PIPE_BYTES
    for _ in range(10):
        assert not stream.put(bytes(100), patience_s=3600)  # would end no test if it waited again
    result = read_in_thread(pipe)
    while not sink.is_empty:
        os.sched_yield()
    for _ in range(1000):
        assert stream.put(bytes(100), patience_s=20)
    stream.close()
    assert len(result()) == (taken + 1000) * 100


def test_a_caller_that_waits_leaves_room_to_those_that_cannot(sink):
    pipe = Pipe()
    stream = Stream(sink, lambda: pipe.writer)
    while stream.put(bytes(100), patience_s=0.5):
        pass
    assert stream.put(b"the agent's own line\n")
    stream.close()
    assert read_in_thread(pipe)().endswith(b"the agent's own line\n")


def test_a_fault_is_reported_once_and_later_lines_are_tried_again(sink, tmp_path):
    faults, places = [], ["/dev/full", tmp_path / "log"]
    stream = Stream(sink, lambda: os.open(places[0], os.O_WRONLY | os.O_CREAT), on_fault=faults.append, notice=notice)
    for _ in range(3):
        stream.put(b"lost\n")
        while not sink.is_empty:
            os.sched_yield()
    log = os.open(places[1], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, stream._fd)
    os.close(log)
    stream.put(b"later\n")
    stream.close()
    assert sink.close(20)
    assert [fault.errno for fault in faults] == [errno.ENOSPC]
    assert stream.dropped == 3
    assert places[1].read_bytes() == b"(3 lines dropped)\nlater\n"


def test_what_cannot_be_opened_is_reported(sink, tmp_path):
    faults = []
    stream = Stream(sink, lambda: os.open(tmp_path / "no" / "log", os.O_WRONLY), on_fault=faults.append)
    stream.put(b"lost\n")
    assert sink.close(20)
    assert [fault.errno for fault in faults] == [errno.ENOENT]
    assert not stream.put(b"late\n")
    assert stream.dropped == 2


def test_a_thread_that_does_not_stay_ends_and_another_takes_its_place(tmp_path):
    sink, done = Sink("test-sink", stays=False), []
    for number in range(3):
        assert sink.put(lambda number=number: done.append((number, threading.get_ident())))
        while any(thread.name == "test-sink" for thread in threading.enumerate()):
            os.sched_yield()
    assert [number for number, _ in done] == [0, 1, 2]
    assert sink.close(0)
    assert not sink.put(done.clear)
