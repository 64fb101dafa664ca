"""The port of an agent: who has the token is let in, who has not learns why and no more, and nobody is in another's way."""

import asyncio
import contextlib
import os
import resource
import socket
import struct
import threading

import pytest
from kit.ends import BOUND_S, Changes, tcp_pair, within_bound
from kit.processes import descriptors

from deadpool_run.agent import refusals
from deadpool_run.agent.rendezvous import peer_server
from deadpool_run.agent.rendezvous.peer_server import PeerServer
from deadpool_run.transport import handshake
from deadpool_run.wire import auth
from deadpool_run.wire.auth import (
    WRONG_TOKEN,
    Challenge,
    ConnectionRole,
    Credentials,
    GreetingRefused,
    GreetingRefusedError,
    Hello,
    Proof,
)
from deadpool_run.wire.frames import pack
from deadpool_run.wire.tags import TAG_BYTES

TOKEN = b"of the job"
LOOPBACK = "127.0.0.1"


class Door(Changes):
    """A server that keeps whom it let in."""

    def __init__(self):
        super().__init__()
        self.came = []
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        self.server = PeerServer(listener, Credentials(TOKEN, "here", "run"), self._come)
        self.port = self.server.port

    def _come(self, role, connection):
        self.came.append((role, connection))
        self.tell()

    async def dial(self, role=ConnectionRole.MEMBER, token=TOKEN, run_id=""):
        """Come as an agent does."""
        return await handshake.connect(LOOPBACK, self.port, role, Credentials(token, "there", run_id), BOUND_S)

    def connect(self):
        """Come and say nothing."""
        sock = socket.create_connection((LOOPBACK, self.port), timeout=BOUND_S)
        sock.settimeout(BOUND_S)
        return sock

    def close(self):
        self.server.close()
        for _, connection in self.came:
            connection.close()


def run(main):
    """Run a test with a door, which is closed behind it."""

    async def whole():
        door = Door()
        try:
            await main(door)
        finally:
            door.close()

    within_bound(whole())


def rest_of(sock):
    """Everything that is said until the other side hangs up, as words."""
    data = b""
    while piece := sock.recv(1 << 16):
        data += piece
    words = []
    while data:
        (length,) = struct.unpack_from(">I", data)
        words.append(auth.decode(data[4 : 4 + length]))
        data = data[4 + length :]
    return words


@pytest.mark.parametrize("role", list(ConnectionRole))
def test_who_has_the_token_is_let_in_for_what_it_wants(role):
    async def main(door):
        with await door.dial(role) as mine:
            await door.until(lambda: door.came)
            ((wanted, theirs),) = door.came
            assert wanted is role
            assert theirs.sock.getblocking()
            mine.send(b"the first byte after the greeting")
            said = theirs.sock.recv(100)
            theirs.receiving.check(said[:-TAG_BYTES], said[-TAG_BYTES:])
            assert said[:-TAG_BYTES] == b"the first byte after the greeting"

    run(main)


def test_who_has_another_token_is_told_so_and_not_let_in():
    async def main(door):
        with pytest.raises(GreetingRefusedError, match=WRONG_TOKEN):
            await door.dial(token=b"another")
        with await door.dial():
            await door.until(lambda: door.came)
        assert len(door.came) == 1

    run(main)


def test_a_stranger_hears_a_challenge_and_a_refusal_and_no_more():
    async def main(door):
        with door.connect() as sock:
            sock.sendall(
                auth.encode(Hello(auth.VERSION, ConnectionRole.VAULT, "00")) + auth.encode(Proof("", "", "", "00"))
            )
            sock.sendall(b"give me everything")
            challenge, refused = await asyncio.to_thread(rest_of, sock)
        assert isinstance(challenge, Challenge)
        assert refused == GreetingRefused(WRONG_TOKEN)
        assert not door.came

    run(main)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 4097), struct.pack(">I", 4000) + b"[" * 4000, b""]
)
def test_one_that_is_no_agent_hears_nothing(said):
    async def main(door):
        with door.connect() as sock:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # more was said than was read
                assert await asyncio.to_thread(rest_of, sock) == []
        assert not door.came

    run(main)


def test_those_who_say_nothing_are_in_nobodys_way():
    async def main(door):
        with contextlib.ExitStack() as silent:
            for _ in range(50):
                silent.enter_context(door.connect())
            with await asyncio.wait_for(door.dial(), handshake.TIMEOUT_S / 2):
                await door.until(lambda: door.came)

    run(main)


def greetings(door):
    return len(door.server._greetings)


def test_however_many_come_only_so_many_are_greeted_at_once(monkeypatch):
    monkeypatch.setattr(peer_server, "_MAX_GREETINGS", 8)

    async def main(door):
        with contextlib.ExitStack() as crowd:
            socks = [crowd.enter_context(door.connect()) for _ in range(400)]
            before = len(descriptors())
            first = asyncio.ensure_future(door.dial())
            for _ in range(2 * len(socks)):  # turns enough to take all of them in
                await asyncio.sleep(0)
            assert greetings(door) == 8
            assert len(descriptors()) <= before + 8 + 1  # those greeted, and the caller's own
            for sock in socks:
                sock.close()
            with await first:
                await door.until(lambda: door.came)

    run(main)


def test_thousands_come_and_go():
    async def main(door):
        for _ in range(3000):
            door.connect().close()
            await asyncio.sleep(0)
        with await door.dial():
            await door.until(lambda: door.came)

    run(main)


def test_where_no_descriptor_is_free_one_waits_until_there_is():
    async def main(door):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as hogs, socket.socket() as sock:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        hogs.callback(os.close, os.dup(0))
                sock.settimeout(BOUND_S)
                sock.connect((LOOPBACK, door.port))
                greeting = asyncio.ensure_future(asyncio.to_thread(_greet, sock))
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not greetings(door)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            hogs.close()
            await greeting
            await door.until(lambda: door.came)

    run(main)


def _greet(sock):
    host, port = sock.getpeername()
    caller = auth.Caller(Credentials(TOKEN), ConnectionRole.MEMBER, f"{host} port {port}")
    sock.sendall(auth.encode(caller.hello))
    while True:
        (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
        answer = caller.answer(auth.decode(sock.recv(length, socket.MSG_WAITALL)))
        if answer is None:
            return
        sock.sendall(auth.encode(answer))


def test_who_sends_more_than_its_proof_before_it_is_let_in_is_refused():
    async def main(door):
        with door.connect() as sock:
            host, port = sock.getpeername()
            caller = auth.Caller(Credentials(TOKEN), ConnectionRole.MEMBER, f"{host} port {port}")

            def hurry():
                sock.sendall(auth.encode(caller.hello))
                (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
                proof = caller.answer(auth.decode(sock.recv(length, socket.MSG_WAITALL)))
                sock.sendall(auth.encode(proof) + b"\0")
                return rest_of(sock)

            (welcome,) = await asyncio.to_thread(hurry)
        assert caller.answer(welcome) is None
        assert not door.came
        assert door.server.refusals.total == 1

    run(main)


def test_who_says_a_byte_now_and_then_is_not_waited_for_longer():
    mine, theirs = tcp_pair()
    found = []

    async def greet():
        over = asyncio.get_running_loop().create_future()
        handshake.Greeting(theirs, Credentials(TOKEN), over.set_result, 0.5)
        return (await over).result

    def receive():
        with pytest.raises(GreetingRefusedError) as refused:
            asyncio.run(greet())()
        found.append(str(refused.value))

    thread = threading.Thread(target=receive)
    thread.start()
    with mine, contextlib.suppress(ConnectionError):
        for byte in struct.pack(">I", 1000) + b" " * 30:
            mine.sendall(bytes([byte]))
            thread.join(0.1)
        pytest.fail("it was greeted for as long as it went on")
    thread.join(BOUND_S)
    assert found == ["it did not end the greeting within 0.5 s"]
    assert theirs.fileno() < 0


def test_closing_cuts_the_greetings_under_way():
    async def main(door):
        with contextlib.ExitStack() as silent:
            socks = [silent.enter_context(door.connect()) for _ in range(5)]
            with await door.dial():  # behind them: they are being greeted
                await door.until(lambda: door.came)
            began = asyncio.get_running_loop().time()
            door.server.close()
            door.server.close()
            assert asyncio.get_running_loop().time() - began < handshake.TIMEOUT_S / 2
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not greetings(door)
            for sock in socks:
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
            with pytest.raises(ConnectionRefusedError):
                await door.dial()

    run(main)


# --- who is refused is counted ---------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(refusals, "tell", lines.append)
    return lines


def test_an_agent_of_another_run_is_refused():
    async def main(door):
        with pytest.raises(GreetingRefusedError, match="run 'other'"):
            await door.dial(run_id="other")
        with await door.dial(run_id="run"):
            await door.until(lambda: door.came)
        assert len(door.came) == 1

    run(main)


def test_one_that_passes_connections_on_is_found_out(told):
    """An agent has ended, and someone who has no token listens in its place: it passes all on to another agent."""

    async def main(door):
        async def relay(reader, writer):
            there, back = await asyncio.open_connection(LOOPBACK, door.port)
            await asyncio.gather(pump(reader, back), pump(there, writer))

        async def pump(reader, writer):
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
            writer.close()

        relaying = await asyncio.start_server(relay, LOOPBACK, 0)
        port = relaying.sockets[0].getsockname()[1]
        with pytest.raises(GreetingRefusedError, match=f"dialled '{LOOPBACK} port {port}' and reached"):
            await handshake.connect(LOOPBACK, port, ConnectionRole.VAULT, Credentials(TOKEN), BOUND_S)
        relaying.close()
        assert not door.came

    run(main)
    assert len(told) == 1


def test_a_crowd_of_refused_callers_is_counted_and_reported_in_one_line(told):
    async def main(door):
        for _ in range(30):
            with pytest.raises(GreetingRefusedError):
                await door.dial(token=b"another")
        assert door.server.refusals.total == 30
        assert len(told) == 1, "the others are reported when the interval is over"

    run(main)
    assert told == [
        f"refused a connection from {LOOPBACK}: {WRONG_TOKEN}",
        f"refused 29 connections, the last from {LOOPBACK}: {WRONG_TOKEN}",
    ]


def test_what_strangers_say_is_printed_without_control_characters(told):
    async def main(door):
        with door.connect() as sock:
            sock.sendall(pack(b'{"type":"\x1b[31m\\u001b[2J"}', 100))
            with contextlib.suppress(ConnectionError):
                await asyncio.to_thread(rest_of, sock)
        assert door.server.refusals.total == 1

    run(main)
    assert told[0].isprintable()


def test_silent_callers_make_room_when_all_places_are_taken(told, monkeypatch):
    """Not after the whole time that a greeting may take, and those first whose host takes the most places."""
    monkeypatch.setattr(peer_server, "_MAX_GREETINGS", 8)
    monkeypatch.setattr(peer_server, "_UNDISTURBED_S", 0.0)

    async def main(door):
        with contextlib.ExitStack() as silent:
            socks = [silent.enter_context(door.connect()) for _ in range(8)]
            with await door.dial():
                await door.until(lambda: door.came)
            assert await asyncio.to_thread(socks[0].recv, 1) == b"", "the oldest went"
        assert door.server.refusals.total >= 1

    run(main)
    assert "others waited" in told[0]


def test_whoever_takes_the_most_places_gives_one_up(monkeypatch, told):
    monkeypatch.setattr(peer_server, "_MAX_GREETINGS", 4)
    monkeypatch.setattr(peer_server, "_UNDISTURBED_S", 0.0)

    async def main(door):
        with contextlib.ExitStack() as silent:

            def come(source):
                sock = silent.enter_context(socket.socket())
                sock.settimeout(BOUND_S)
                sock.bind((source, 0))
                sock.connect((LOOPBACK, door.port))
                return sock

            first = come("127.0.0.2")
            crowd = [come("127.0.0.3") for _ in range(3)]
            with await door.dial():
                await door.until(lambda: door.came)
            assert await asyncio.to_thread(crowd[0].recv, 1) == b""
            first.setblocking(False)
            with pytest.raises(BlockingIOError):
                first.recv(1)

    run(main)
