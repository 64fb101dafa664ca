"""A program that a script starts gets none of the descriptors that its worker was sent."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
from kit.orders import assign

from deadpool_run.agent.processes.forkserver_main import _ForkServer
from deadpool_run.wire.messages import encode
from deadpool_run.worker.process import agent_link
from deadpool_run.worker.process.agent_link import AgentLink

NAME = "deadpool-test-slot"


def parked(sock):
    return agent_link.park(sock)[1]


def running(sock):
    link = object.__new__(AgentLink)
    link._control, link._fds = sock, []
    link._receive()
    return link._fds


def forking(sock):
    return _ForkServer(sock, 0)._take().fds


@pytest.mark.parametrize("receive", [parked, running, forking], ids=lambda each: each.__name__)
def test_a_program_that_a_script_starts_gets_no_descriptor_of_the_job(receive):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        slot = os.memfd_create(NAME)
        message = b'{"do": "fork"}' if receive is forking else encode(assign(fds=("slot",)))
        socket.send_fds(ours, [message], [slot, slot])
        os.close(slot)
        fds = receive(theirs)
    assert [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in fds] == [f"/memfd:{NAME} (deleted)"] * 2
    listed = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, check=True, capture_output=True, text=True)
    for fd in fds:
        os.close(fd)
    assert NAME not in listed.stdout
