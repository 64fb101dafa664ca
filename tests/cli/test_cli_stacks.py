"""The stacks of a process are had from outside, whatever it does, and it goes on."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from deadpool_run.cli.runs import stacks
from deadpool_run.cli.runs.stacks import NoStackError, stacks_of

WORKER = """
import ctypes, sys
from deadpool_run.worker.process.stacks import install
install()
def spin():
    print("up", flush=True)
    {what}
spin()
"""


@contextmanager
def process(code):
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as found:
        try:
            assert found.stdout.readline() == b"up\n"
            yield found
        finally:
            found.kill()


def test_a_process_that_waits_shows_its_stacks_and_goes_on():
    with process(WORKER.format(what="sys.stdin.readline(); print('on', flush=True); sys.stdin.readline()")) as worker:
        for _ in range(2):
            assert stacks_of(worker.pid).count("in spin\n") == 1
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == b"on\n"


def test_a_process_that_keeps_the_interpreter_shows_its_stacks():
    with process(WORKER.format(what="ctypes.PyDLL(None).sleep(600)")) as worker:
        assert "in spin\n" in stacks_of(worker.pid)


def test_a_process_that_does_not_handle_the_request_is_left_alone():
    with process("print('up', flush=True); input()") as worker:
        with pytest.raises(NoStackError, match="does not handle the request"):
            stacks_of(worker.pid)
        assert worker.poll() is None
    with pytest.raises(NoStackError, match="has ended"):
        stacks_of(worker.pid)


def test_of_a_stopped_process_its_state_is_told(monkeypatch):
    monkeypatch.setattr(stacks, "_ANSWER_S", 0.2)
    with process(WORKER.format(what="sys.stdin.readline()")) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(NoStackError, match=r"did not answer within 0.2 s: its process is in state 'stopped'"):
            stacks_of(worker.pid)
