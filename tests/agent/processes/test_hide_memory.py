"""An agent holds the job's token: other processes of the user can look neither into it nor into a core file of it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, json, os, socket, subprocess, sys
from pathlib import Path
from deadpool_run.agent.processes.children import hide_memory
from deadpool_run.coordinator.address import control_address

user, folder = int(sys.argv[1]), Path(sys.argv[2])
if user != os.getuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after the exec of an agent that was not started by root
hide_memory()
with control_address(folder) as address, socket.socket(socket.AF_UNIX) as sock:
    sock.bind(address)
dumpable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
shell = "exec 3</proc/self/environ; readlink /proc/self/fd/3"
child = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=False)
print(json.dumps([dumpable, child.returncode, list(map(str, folder.iterdir()))]))
sys.stdin.read()
"""
STRANGER = "import os, sys; os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1])); open(sys.argv[2], 'rb').read()"

as_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")


def looked_into(hidden, user):
    """Whether another process of the user can read the environment of `hidden`."""
    command = [sys.executable, "-c", STRANGER, str(user), f"/proc/{hidden.pid}/environ"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@as_root
def test_no_other_process_of_the_user_looks_into_an_agent_and_it_works_all_the_same():
    user = 12345
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = Path(base, "a" * 100)  # too long for a socket's address: it is bound through /proc/self/fd
        folder.mkdir()
        for each in (Path(base), folder):
            os.chown(each, user, user)
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(user), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as hidden:
            said = hidden.stdout.readline()
            assert said == f'[0, 0, ["{folder}/control.sock"]]\n'
            assert not looked_into(hidden, user)
            hidden.stdin.close()


@as_root
def test_a_process_that_is_not_hidden_can_be_looked_into():
    """So that the test above shows something."""
    user = 12345
    sleeper = SCRIPT.replace("\nhide_memory()\n", "\n")
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        os.chown(base, user, user)
        with subprocess.Popen(
            [sys.executable, "-c", sleeper, str(user), base], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as plain:
            assert plain.stdout.readline().startswith("[1, 0")
            assert looked_into(plain, user)
            plain.stdin.close()
