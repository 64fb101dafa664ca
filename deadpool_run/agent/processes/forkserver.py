"""Client of the fork server: orders processes, and restarts the server if it dies."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from deadpool_run.agent.console import tell
from deadpool_run.agent.processes import children as processes
from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.agent.processes.controlled_process import ControlledProcess
from deadpool_run.agent.processes.forkserver_main import MAX_PACKET_BYTES
from deadpool_run.agent.processes.forkserver_process import ForkServerProcess, ForkServerSpec
from deadpool_run.text import printable, shortened
from deadpool_run.wire.auth import Credentials

_NAMED = 5
"""The most processes that a line names."""
_MAX_DEATHS_UNPREPARED = 3
"""Fork servers in a row that may die before they can fork. Then the job ends."""


class ForkServer:
    """Forks processes on request, and watches them. Requests wait while the server imports.

    `on_lost` is called with the reason when no fork server can be started. If one dies, the next one gets the list of living
    processes, to end their groups when the agent is gone.
    """

    def __init__(
        self,
        spec: ForkServerSpec,
        on_lost: Callable[[str], None],
        first: ForkServerProcess | None = None,
        grace_s: float = 0.0,
    ) -> None:
        """`grace_s`: from SIGTERM to SIGKILL, for the background processes of workers that ended in order."""
        self._spec, self._grace_s = spec, grace_s
        self.environment = spec.environment
        """Environment of its processes, which workers extend. It has the mark that finds their descendants."""
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._orders: dict[int, ControlledProcess] = {}  # not answered yet
        self._unanswered: asyncio.Event | None = None
        self._next_order = 0
        self._children: dict[int, Process] = {}  # forked and not yet reaped
        self._adopted: dict[int, Process] = {}  # started by another part of this process, and not yet reaped
        self._expected = 0
        self._prepared = False
        self._deaths = 0
        self._closed = False
        self._witness: Mapping[str, Any] | None = None
        self._process: Process
        self._sock: socket.socket
        self._take_over(first or spec.start())

    def children(self) -> list[Process]:
        """Return all forked processes that have not been reaped."""
        return list(self._children.values())

    def processes(self) -> list[Process]:
        """Return its own process, if that has not been reaped, and its children."""
        return [*([self._process] if self._process.alive else []), *self.children(), *self._adopted.values()]

    def reap_strangers(self) -> None:
        """Reap processes adopted from workers, unless a forked one may be unknown. For SIGCHLD's handler."""
        if not (self._orders or self._expected):
            processes.reap_strangers({process.pid: process for process in self.processes()}.get)

    def expect(self) -> None:
        """Reap no unknown process until `adopt` or `unexpect`: another part of this process starts one."""
        self._expected += 1

    def unexpect(self) -> None:
        """Reap unknown processes again: none was started."""
        self._expected -= 1

    def adopt(self, pid: int, on_exit: Callable[[Exit], None]) -> Process:
        """Watch a child that another part of this process has started, as leader of its own process group."""
        self._expected -= 1

        def ended(end: Exit) -> None:
            del self._adopted[pid]
            on_exit(end)

        self._adopted[pid] = Process(pid, ended)
        return self._adopted[pid]

    def end_strangers(self) -> None:
        """Ask processes adopted from workers to end, and wait up to the grace, unless a forked one may be unknown.

        Before `close`: a fork server that ends kills all that is left of the job.
        """
        if not self._orders:
            ours = [process.pid for process in self.processes()]
            processes.kill_strangers(0.0, ours, self._grace_s, _announce_wait)

    def kill_strangers(self, timeout_s: float) -> None:
        """SIGKILL and reap processes adopted from workers, for up to `timeout_s`."""
        processes.kill_strangers(timeout_s, but=[process.pid for process in self.processes()])

    async def settled(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until no order is open. After `close` orders are not answered."""
        if self._orders and not self._closed:
            self._unanswered = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._unanswered.wait(), timeout_s)

    def fork(self, child: ControlledProcess) -> None:
        """Order a process. If the fork server dies before it answers, the next one gets the order, with new descriptors.

        A child of the first attempt then has a socket without a peer, and ends.
        """
        number = self._next_order
        self._next_order += 1
        self._orders[number] = child
        if self._prepared:
            self._send_order(number)

    def recall(self, child: ControlledProcess) -> None:
        """Cancel an order that has not been sent. One that was sent is answered all the same."""
        child.recalled = True
        if not self._prepared:
            self._forget_recalled()

    def testify(self, credentials: Credentials, agents: Sequence[tuple[str, int]]) -> None:
        """Have the fork server tell these agents when this one and its workers have ended."""
        node, run, token = credentials.node, credentials.run_id, credentials.token.hex()
        self._witness = {"do": "witness", "node": node, "run": run, "token": token, "agents": list(agents)}
        self._send(self._witness)

    def close(self) -> None:
        """Let the fork server end. Its process is reaped by the loop."""
        self._closed = True
        self._hang_up()

    def _take_over(self, forkserver: ForkServerProcess) -> None:
        self._sock = forkserver.sock
        self._sock.setblocking(False)
        self._prepared = False
        self._process = Process(forkserver.pid, self._on_exit)
        self._loop.add_reader(self._sock, self._read)
        if self._witness is not None:
            self._send(self._witness)

    def _send(self, packet: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        if self._sock.fileno() < 0:
            return
        try:
            socket.send_fds(self._sock, [json.dumps(packet).encode()], fds)
        except (BrokenPipeError, ConnectionResetError):
            return  # its pidfd reports its end
        except BlockingIOError:  # hundreds of packets unread: it hangs, and the next one does its work
            self._process.signal_group(signal.SIGKILL)

    def _send_order(self, number: int) -> None:
        child = self._orders[number]
        fds = child.make_fds()
        self._send({"do": "fork", "id": number, "kind": child.kind}, fds)
        for fd in fds:
            os.close(fd)

    def _read(self) -> None:
        while self._sock.fileno() >= 0:
            try:
                packet = self._sock.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._hang_up()
                return
            self._take(json.loads(packet))

    def _take(self, answer: Mapping[str, Any]) -> None:
        match answer:
            case {"prepared": True}:
                self._prepared = True
                self._deaths = 0
                self._forget_recalled()
                for number in list(self._orders):
                    self._send_order(number)
            case {"id": number, "pid": pid}:
                child = self._orders.pop(number)
                process = self._children[pid] = Process(pid, partial(self._child_ended, pid, child), self._grace_s)
                child.forked(process)
            case {"id": number, "failed": why}:
                self._orders.pop(number).unforked(why)
            case {"failed": why}:
                self._closed = True
                self._on_lost(why)
        self._look_whether_settled()

    def _child_ended(self, pid: int, child: ControlledProcess, exit_: Exit) -> None:
        del self._children[pid]
        self._send({"do": "reaped", "pid": pid})
        child.exited(exit_)

    def _forget_recalled(self) -> None:
        """Forget recalled orders, which the present fork server does not have."""
        self._orders = {number: child for number, child in self._orders.items() if not child.recalled}
        self._look_whether_settled()

    def _look_whether_settled(self) -> None:
        if not self._orders and self._unanswered is not None:
            self._unanswered.set()

    def _hang_up(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _on_exit(self, exit_: Exit) -> None:
        self._read()  # what it answered before it died
        self._hang_up()
        if self._closed:
            return
        self._deaths += not self._prepared
        if self._deaths >= _MAX_DEATHS_UNPREPARED:
            self._closed = True
            self._on_lost(f"the process that starts workers ended {self._deaths} times before it could ({exit_})")
        else:
            self._take_over(self._spec.start(self._children))


def _announce_wait(pids: Collection[int], left_s: float) -> None:
    """Print which processes delay the end of the job."""
    named = printable(shortened([processes.title(pid) for pid in sorted(pids)], _NAMED))
    tell(
        f"waiting up to {left_s:.0f} s (--shutdown-timeout) for processes of workers that SIGTERM did not end: {named}"
    )
