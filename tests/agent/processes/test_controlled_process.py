"""The control channel and the watch on a process, in one loop, against real sockets and real children."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit.orders import assign

from deadpool_run.agent.processes import children
from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.agent.processes.controlled_process import MAX_UNSENT_BYTES, ControlChannel, ControlledProcess
from deadpool_run.core.effects import AbortStep
from deadpool_run.core.events import WorkerRaised, WorkerReady
from deadpool_run.ids import WorkerId
from deadpool_run.wire.messages import FORMAT, THIS_WORKER, encode

TIMEOUT_S = 10
WORKER = WorkerId(7)


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(TIMEOUT_S):
            await coroutine

    asyncio.run(bounded())


async def turn():
    """Let the loop handle what is ready."""
    await asyncio.sleep(0)


class Peer:
    """A channel, its other end, and what it called back."""

    def __init__(self, max_unsent_bytes=MAX_UNSENT_BYTES):
        ours, self.sock = socket.socketpair()
        self.sock.settimeout(TIMEOUT_S)
        self.heard = asyncio.Queue()
        self.broken = []
        self.channel = ControlChannel(ours, FORMAT, max_unsent_bytes, self.heard.put_nowait, self.ended)

    def ended(self, why):
        if not isinstance(why, ConnectionResetError):
            self.broken.append(why)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()
        self.sock.close()


def test_messages_arrive_whole_however_they_are_cut():
    async def main():
        with Peer() as peer:
            sent = [WorkerReady(THIS_WORKER), WorkerRaised(THIS_WORKER, 3, "ValueError", "x" * 100_000, "")]
            data = b"".join(map(encode, sent))
            for start in range(0, len(data), 4001):
                await asyncio.get_running_loop().sock_sendall(set_free(peer.sock), data[start : start + 4001])
            assert [await peer.heard.get() for _ in sent] == sent

    run(main())


def set_free(sock):
    sock.setblocking(False)
    return sock


def test_descriptors_come_with_their_message_only():
    async def main():
        with Peer() as peer:
            reader, writer = os.pipe()
            peer.channel.send(AbortStep(WORKER, 1))
            peer.channel.send(assign(fds=("stdout",)), [writer])
            os.close(writer)
            frames, got, heard = FORMAT.frames(), [], []
            while len(heard) < 2:
                data, fds, _, _ = await asyncio.to_thread(socket.recv_fds, peer.sock, 1 << 16, 4)
                got += fds
                heard += frames.feed(data)
            assert heard == [AbortStep(WORKER, 1), assign(fds=("stdout",))]
            (given,) = got
            os.write(given, b"here")
            os.close(given)
            assert os.read(reader, 16) == b"here"
            os.close(reader)

    run(main())


def test_what_the_peer_does_not_take_yet_waits_in_order():
    async def main():
        with Peer() as peer:
            orders = [assign(env={"A": letter * 300_000}) for letter in "abc"]
            for order in orders:
                peer.channel.send(order)
            frames, heard = FORMAT.frames(), []
            loop = asyncio.get_running_loop()
            while len(heard) < len(orders):
                heard += frames.feed(await loop.sock_recv(set_free(peer.sock), 1 << 16))
            assert heard == orders
            assert not peer.broken

    run(main())


def test_a_peer_that_never_reads_is_broken():
    async def main():
        with Peer(max_unsent_bytes=1_000_000) as peer:
            reader, writer = os.pipe()
            for _ in range(3):
                peer.channel.send(assign(env={"A": "a" * 600_000}, fds=("stdout",)), [writer])
            os.close(writer)
            assert len(peer.broken) == 1
            assert "does not read" in str(peer.broken[0])
            peer.channel.send(AbortStep(WORKER, 1))  # of no effect
            peer.sock.close()
            assert os.read(reader, 1) == b"", "a descriptor that was never sent is still open"
            os.close(reader)

    run(main())


def test_a_peer_that_talks_nonsense_is_broken():
    async def main():
        with Peer() as peer:
            peer.sock.sendall(b"\x00\x00\x00\x02{}")
            while not peer.broken:
                await turn()
            assert "not a message" in str(peer.broken[0])

    run(main())


def test_a_worker_that_ended_is_heard_although_nothing_reaches_it():
    async def main():
        with Peer() as peer:
            peer.sock.sendall(encode(WorkerRaised(THIS_WORKER, 3, "ValueError", "x", "")))
            peer.sock.close()
            peer.channel.send(AbortStep(WORKER, 1))
            assert await peer.heard.get() == WorkerRaised(THIS_WORKER, 3, "ValueError", "x", "")
            assert not peer.broken

    run(main())


def test_the_rest_can_be_read_after_the_peer_is_gone():
    async def main():
        with Peer() as peer:
            peer.sock.sendall(b"".join(encode(AbortStep(WORKER, epoch)) for epoch in range(1000)))
            peer.sock.close()
            peer.channel.read_rest()
            assert peer.heard.qsize() == 1000
            assert not peer.broken

    run(main())


def exists(pid):
    return Path(f"/proc/{pid}").exists()


def wait_for_any_child():
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)


def start(code):
    """Start a child that leads its own group, to be reaped by `Process`."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code], start_new_session=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    child.returncode = 0
    return child


def controlled():
    """Return a process that does nothing, and our copy of its end of the control socket."""
    ended = asyncio.Event()
    found = ControlledProcess(
        "worker",
        on_started=lambda: None,
        on_message=lambda _: None,
        on_failed=lambda _: None,
        on_ended=lambda _: ended.set(),
    )
    (theirs,) = found.make_fds()
    found.forked(Process(start("import signal; signal.pause()").pid, found.exited))
    return found, socket.socket(fileno=theirs), ended


def test_a_process_that_talks_nonsense_is_killed():
    async def main():
        _, theirs, ended = controlled()
        with theirs:
            theirs.sendall(b"\x00\x00\x00\x02{}")
            await ended.wait()

    run(main())


def test_a_process_that_closes_its_socket_lives_on():
    async def main():
        process, theirs, ended = controlled()
        theirs.close()
        while process.channel.open:
            await turn()
        assert not process.doomed
        process.kill()
        await ended.wait()

    run(main())


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("", Exit(0, None)),
        ("raise SystemExit(7)", Exit(7, None)),
        ("import os; os.kill(os.getpid(), 11)", Exit(None, signal.SIGSEGV)),
        ("import os; os.abort()", Exit(None, signal.SIGABRT)),
    ],
)
def test_an_end_is_told_once(code, end):
    async def main():
        ends = []
        child = start(code)
        process = Process(child.pid, ends.append)
        await process.gone.wait()
        process.reap()
        process.signal_group(signal.SIGKILL)
        process.kill_after(0)
        assert ends == [end]
        assert not process.alive
        child.stdout.close()

    run(main())


HELPED = """
import os, signal, subprocess, sys
helper = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
print(helper.pid, flush=True)
{then}
"""


def test_what_is_left_of_its_group_ends_with_it():
    async def main():
        child = start(HELPED.format(then=""))
        process = Process(child.pid, lambda _: None)
        helper = os.pidfd_open(int(child.stdout.readline()))
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(helper, ended.set)
        await process.gone.wait()
        await ended.wait()
        asyncio.get_running_loop().remove_reader(helper)
        os.close(helper)
        child.stdout.close()

    run(main())


def test_the_grace_is_kept_and_then_ended():
    async def main():
        ignoring = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\nwhile True: signal.pause()"
        child = start(ignoring)
        ends = []
        process = Process(child.pid, ends.append)
        child.stdout.readline()
        loop = asyncio.get_running_loop()
        began = loop.time()
        process.signal_group(signal.SIGTERM)
        process.kill_after(0.3)
        process.kill_after(60)  # a later call does not lengthen it
        await process.gone.wait()
        assert ends == [Exit(None, signal.SIGKILL)]
        assert 0.3 <= loop.time() - began < 5
        child.stdout.close()

    run(main())


def test_strangers_are_reaped_and_ours_are_told():
    async def main():
        ends = []
        ours, stranger = start(""), start("")
        process = Process(ours.pid, ends.append)
        while process.alive or exists(stranger.pid):
            wait_for_any_child()
            children.reap_strangers({ours.pid: process}.get)
        assert ends == [Exit(0, None)]
        for child in (ours, stranger):
            child.stdout.close()

    run(main())


def test_children_that_are_left_are_killed():
    child = start("import signal; signal.pause()")
    children.kill_strangers(5)
    assert not exists(child.pid)
    child.stdout.close()
