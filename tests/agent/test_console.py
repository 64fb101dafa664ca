"""Lines for the user about decisions, and a console that has stalled."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from deadpool_run.agent.console import Console, announcement, report_request, tell


def test_a_reason_of_one_line_is_on_the_line():
    assert announcement("stopping the job", "rank 1 hung") == "stopping the job: rank 1 hung"
    assert announcement("finished", "") == "finished"


def test_a_reason_of_several_lines_is_below():
    assert announcement("stopping the job", "wrong\nwrite it so\n") == "stopping the job:\n  wrong\n  write it so"


def test_a_line_has_no_password_of_a_url(capfd):
    tell("step 8 is durable: ftp://me:secret@host/kept/it (1.0 MB)")
    assert capfd.readouterr().err == "deadpool-run: step 8 is durable: ftp://me:***@host/kept/it (1.0 MB)\n"


def test_a_report_names_versions_and_the_journal():
    text = report_request(Path("/runs/1/journal.jsonl"))
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert "deadpool-run " in text
    assert text.endswith("journal: /runs/1/journal.jsonl")


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_two_descriptors_of_one_file_share_a_thread_and_lines_stay_whole(pipe):
    reader, writer = pipe
    other, made = os.dup(writer), Console()
    lines = {fd: [b"%d " % fd + b"x" * 5000 + b"%d\n" % number for number in range(500)] for fd in (writer, other)}
    found = []
    reading = threading.Thread(target=lambda: found.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
    reading.start()
    for both in zip(*lines.values(), strict=True):
        for fd, line in zip(lines, both, strict=True):
            assert made.stream(fd).put(line, patience_s=20)
    assert made.close(20)
    os.close(other)
    os.close(writer)
    reading.join()
    shown = b"".join(found).splitlines(keepends=True)
    assert [line for line in shown if line in lines[writer]] == lines[writer]
    assert sorted(shown) == sorted(line for mine in lines.values() for line in mine)


def test_a_closed_descriptor_is_no_error():
    made = Console()
    made.stream(1 << 20).put(b"line\n")
    assert made.close(20)
    assert made.dropped == 1


STALLED = """
import os, sys
from deadpool_run.agent import console
console._GRACE_S = 0.5
os.set_blocking(2, False)
try:
    while True:
        os.write(2, bytes(1 << 16))
except BlockingIOError:
    os.set_blocking(2, True)
with console.in_background():
    for number in range(1000):
        console.tell(str(number))
console.tell("after the block")
print("ended")
"""


def test_a_process_whose_stderr_is_never_read_ends():
    """Its stderr is a pipe that is full."""
    program = subprocess.Popen([sys.executable, "-c", STALLED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with program:
        assert program.stdout.read() == b"ended\n"
        assert program.wait(20) == 0
