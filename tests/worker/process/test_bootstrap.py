"""A real worker process, from its parking to the user's script, with this test as its agent."""

import json
import os
import socket
import subprocess
import sys
import tempfile

import pytest
from kit.orders import assign

from deadpool_run.core.events import WorkerReady
from deadpool_run.wire.messages import FORMAT, THIS_WORKER, encode

LIMIT_S = 60
COMMAND = "import sys; from deadpool_run.worker.process.bootstrap import main; main(int(sys.argv[1]))"


@pytest.fixture
def run_script(tmp_path):
    """Give a parked worker a rank, whose script this is; return what each of its writes to standard output wrote."""

    def run(text, *words, local_rank=0):
        script = tmp_path / "train.py"
        script.write_text(text)
        ours, theirs = socket.socketpair()
        # Datagrams keep the writes apart.
        shown, stdout = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-u", "-c", COMMAND, str(theirs.fileno())]
        with (
            subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker,
            ours,  # closed first, which ends the worker
            shown,
            tempfile.TemporaryFile() as memory,
        ):
            theirs.close()
            ours.settimeout(LIMIT_S)
            shown.settimeout(LIMIT_S)
            assert list(FORMAT.frames().feed(ours.recv(1000))) == [WorkerReady(THIS_WORKER)]
            memory.truncate(1 << 20)
            names = ("status_page", "slot0", "slot1", "transcript", "stdout")
            fds = [*[memory.fileno()] * 4, stdout.fileno()]
            socket.send_fds(ours, [encode(assignment([str(script), *words], names, local_rank))], fds)
            stdout.close()
            writes = []
            while data := shown.recv(1 << 16):
                writes.append(data)
            ours.close()
            worker.wait(LIMIT_S)
        return writes

    return run


def assignment(argv, names, local_rank):
    env = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "DEADPOOL_STORE": "127.0.0.1:1",
        "DEADPOOL_EPOCH": "1",
        "DEADPOOL_WORKER": "1",
        "DEADPOOL_REPLACEMENT": "0",
        "DEADPOOL_CAPTURE_INTERVAL": "1",
        "DEADPOOL_TARGET": json.dumps({"mode": "script", "argv": argv, "copy": ""}),
    }
    return assign(local_rank=local_rank, env=env, fds=list(names))


def test_a_printed_line_is_one_write(run_script):
    assert run_script("print('step', 1)\nprint('step', 2)\nprint('rest', end='')") == [
        b"step 1\n",
        b"step 2\n",
        b"rest",
    ]


def test_a_script_that_runs_again_has_its_arguments_and_a_main_module_of_its_own(run_script):
    script = """
import os, sys
from deadpool_run.errors import RunLeft
print(sys.argv[1:], os.environ["LOCAL_RANK"], vars(sys.modules["__main__"]) is vars(), vars().get("model"))
model = "large"
if not hasattr(sys, "ran"):
    sys.ran = True
    raise RunLeft
"""
    # As with --virtual-local-rank: LOCAL_RANK is 0 on every rank, the argument is not.
    assert run_script(script, "--log", "of-${local_rank}", local_rank=3) == [
        b"['--log', 'of-3'] 0 True None\n",
        b"[rehearsal] ['--log', 'of-3'] 0 True None\n",
    ]
