"""The fork server by itself, with a test in the agent's place."""

import asyncio
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import uuid

import pytest
from kit.cluster import SCRIPTS

from deadpool_run.agent.processes import children
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.forkserver_main import COMMAND, MARK
from deadpool_run.agent.processes.forkserver_process import ForkServerProcess, ForkServerSpec


@pytest.fixture
def member():
    """A process that leads its own group and waits."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], process_group=0)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("unread", [False, True])
def test_it_ends_the_groups_also_when_the_agent_died_before_it_read_an_answer(member, unread):
    agent, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-u", "-c", COMMAND, str(ours.fileno()), str(os.getpid()), "1000"]
    env = {**os.environ, MARK: uuid.uuid4().hex}  # the fork server ends every process that carries its mark
    with agent, subprocess.Popen(command, pass_fds=[ours.fileno()], env=env) as forkserver:
        ours.close()
        agent.send(json.dumps({"do": "adopt", "pids": [member.pid]}).encode())
        agent.send(json.dumps({"do": "prepare", "modules": []}).encode())
        assert select.select([agent], [], [], 30)[0]
        if not unread:
            agent.recv(1 << 16)
        agent.close()
        assert member.wait(30) == -signal.SIGKILL
        assert forkserver.wait(30) == 0


def said_by(script):
    done = subprocess.run([sys.executable, SCRIPTS / script], check=False, capture_output=True, text=True, timeout=60)
    return done.stdout, done.stderr


def test_a_store_that_is_closed_before_there_is_a_process_for_it_is_never_made():
    """As on a node that leads and is fenced while its fork server still imports."""
    assert said_by("closed_store.py") == ("lost [] made None\n", "")


def test_what_it_has_forked_is_no_stranger_though_nobody_needs_it_any_more():
    """As the store of a node that led and is fenced: reaped twice, its end would be a bug, and that of the agent."""
    assert said_by("late_end.py") == ("left [] bugs []\n", "")


def test_of_several_that_are_made_at_once_none_holds_the_others_lines():
    """Else the end of one would not be seen: its socket is at its end when nobody has the other end any more."""
    assert said_by("litter.py") == ("ended b''\n" * 4 + "4 said 1\n", "")


def test_its_processes_keep_the_users_limit_on_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, before[1]))
    try:
        spec = ForkServerSpec((), {**os.environ, MARK: uuid.uuid4().hex})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    forkserver = spec.start()
    with forkserver.sock:
        assert select.select([forkserver.sock], [], [], 30)[0]
        assert resource.prlimit(forkserver.pid, resource.RLIMIT_NOFILE) == (700, before[1])
    os.waitpid(forkserver.pid, 0)


def test_a_child_that_ends_before_it_is_adopted_is_not_reaped_as_a_stranger(member):
    """As a command that is started by a thread, and ends at once: its exit code is asked for."""

    def end_at_once():
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], os.environ)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    async def run():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = ForkServer(ForkServerSpec((), {}), print, ForkServerProcess(member.pid, ours))
        ended = asyncio.get_running_loop().create_future()
        with theirs:
            server.expect()
            pid = end_at_once()
            server.reap_strangers()
            server.adopt(pid, ended.set_result)
            assert pid in {process.pid for process in server.processes()}
            assert (await asyncio.wait_for(ended, 30)).code == 3
            assert pid not in {process.pid for process in server.processes()}
            server.close()
            member.kill()
            await children.wait_gone(server.processes(), 30)

    asyncio.run(run())
