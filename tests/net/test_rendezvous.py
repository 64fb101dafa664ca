"""How an agent finds its job: one founds it, the others find it, and nobody waits for what cannot come."""

import asyncio
import errno
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from kit.ends import Changes, within_bound

from deadpool_run.agent.rendezvous import rendezvous
from deadpool_run.agent.rendezvous.peer_server import PeerServer
from deadpool_run.agent.rendezvous.rendezvous import Former, Found, Founder, Over, dial, find, redirect
from deadpool_run.agent.spec import Cluster
from deadpool_run.core.settings import Settings
from deadpool_run.errors import UsageError
from deadpool_run.transport import handshake
from deadpool_run.wire.auth import ConnectionRole, Credentials

LOOPBACK = "127.0.0.1"
TOKEN = b"of the job"


def settings(join_timeout_s=60.0, node_timeout_s=5.0):
    return Settings(world_size=1, join_timeout_s=join_timeout_s, node_timeout_s=node_timeout_s)


LONG = settings()


def cluster(*ports, host=LOOPBACK, token=TOKEN):
    return Cluster(endpoints=tuple((host, port) for port in ports), token=token, node_name="n")


def free_port():
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        return sock.getsockname()[1]


def never():
    return asyncio.get_running_loop().create_future()


class Led(Changes):
    """A job that is led: whoever finds it is kept."""

    def __init__(self, founder, run_id=""):
        super().__init__()
        self.came = []
        self.server = PeerServer(founder.listener, Credentials(TOKEN, run_id=run_id), self._come)

    def _come(self, role, connection):
        self.came.append((role, connection))
        self.tell()

    def close(self):
        self.server.close()
        for _, connection in self.came:
            connection.close()


def test_the_first_founds_the_job_and_the_others_find_it():
    async def main():
        port = free_port()
        founder = await find(cluster(port), never(), settings=LONG)
        assert isinstance(founder, Founder)
        assert founder.address == LOOPBACK
        with closing(Led(founder)) as led:
            assert led.server.port == port
            for former in (None, Former()):
                found = await find(cluster(port), never(), former=former, settings=LONG)
                assert isinstance(found, Found)
                with found.connection, found.listener:
                    assert found.address == LOOPBACK
                    assert found.listener.getsockname()[0] == LOOPBACK
            await led.until(lambda: len(led.came) == 2)
            assert [role for role, _ in led.came] == [ConnectionRole.MEMBER] * 2

    within_bound(main())


class Threads(ThreadPoolExecutor):
    """Counts what it is given."""

    calls = 0

    def submit(self, *call, **more):
        self.calls += 1
        return super().submit(*call, **more)


def test_a_leader_that_another_agent_names_is_dialled_in_one_thread():
    async def main():
        port = free_port()
        with closing(Led(await find(cluster(port), never(), settings=LONG))), Threads() as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            found = await redirect(cluster(port), LOOPBACK, port)
            with found.connection, found.listener:
                assert found.connection.sock.getpeername() == (LOOPBACK, port)
            assert await redirect(cluster(port), LOOPBACK, free_port()) is None
            assert threads.calls == 2

    within_bound(main())


def test_of_all_that_start_at_once_one_founds_it():
    async def main():
        port = free_port()
        seeking = [asyncio.ensure_future(find(cluster(port), never(), settings=LONG)) for _ in range(6)]
        done, _ = await asyncio.wait(seeking, return_when=asyncio.FIRST_COMPLETED)
        (founder,) = [each.result() for each in done]
        assert isinstance(founder, Founder)
        with closing(Led(founder)):
            for each in seeking:
                found = await each
                if found is not founder:
                    assert isinstance(found, Found)
                    found.connection.close()
                    found.listener.close()

    within_bound(main())


def test_who_comes_before_the_first_waits_for_it():
    async def main():
        first, second = free_port(), free_port()
        early = asyncio.ensure_future(find(cluster(first), never(), former=Former(), settings=LONG))
        other = asyncio.ensure_future(find(cluster(second, first), never(), former=Former(), settings=LONG))
        founder = await find(cluster(first), never(), settings=LONG)
        with closing(Led(founder)):
            for each in (early, other):
                found = await each
                assert isinstance(found, Found)
                found.connection.close()
                found.listener.close()

    within_bound(main())


def test_who_is_hung_up_on_asks_again():
    """An agent that ends takes connections to its last moment."""

    async def main():
        listener = socket.create_server((LOOPBACK, 0))
        seeks = cluster(listener.getsockname()[1])
        early = asyncio.ensure_future(find(seeks, never(), former=Former(), settings=LONG))
        sock, _ = await asyncio.to_thread(listener.accept)
        with sock:
            assert await asyncio.to_thread(sock.recv, 1 << 16)
        with closing(Led(Founder(LOOPBACK, listener))):
            found = await early
            assert isinstance(found, Found)
            found.connection.close()
            found.listener.close()

    within_bound(main())


def test_another_token_is_told_to_the_user_with_advice():
    async def main():
        port = free_port()
        with closing(Led(await find(cluster(port), never(), settings=LONG))) as led:
            with pytest.raises(UsageError) as caught:
                await find(cluster(port, token=b"another"), never(), settings=LONG)
            first, last = str(caught.value).splitlines()
            assert f"{LOOPBACK}:{port} refused this node" in first
            assert "--token-file" in last
            with pytest.raises(ConnectionRefusedError) as refused:
                await asyncio.to_thread(dial, ConnectionRole.VAULT, LOOPBACK, port, Credentials(b"another"))
            assert refused.value.errno == errno.ECONNREFUSED
            assert not led.came

    within_bound(main())


def test_a_vault_is_reached_through_the_same_port():
    async def main():
        port = free_port()
        with closing(Led(await find(cluster(port), never(), settings=LONG))) as led:
            with await asyncio.to_thread(dial, ConnectionRole.VAULT, LOOPBACK, port, Credentials(TOKEN)):
                await led.until(lambda: led.came)
            assert led.came[0][0] is ConnectionRole.VAULT

    within_bound(main())


def test_another_program_on_the_port_is_told_to_the_user_with_advice():
    with socket.create_server((LOOPBACK, 0)) as server:

        def serve():
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.recv(1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UsageError) as caught:
            within_bound(find_with_own_future(cluster(server.getsockname()[1])))
        thread.join(10)
    assert "--rdzv-endpoint names another port" in str(caught.value).splitlines()[-1]


async def find_with_own_future(where):
    return await find(where, never(), settings=LONG)


@pytest.mark.parametrize("host", ["256.1.2.3.4.5", "x" * 70, "a..b"])
def test_a_host_that_is_none_is_told_to_the_user_with_advice(host):
    with pytest.raises(UsageError) as caught:
        within_bound(find_with_own_future(cluster(1, host=host)))
    first, last = str(caught.value).splitlines()
    assert host in first
    assert "write an address" in last


def test_a_stop_ends_the_wait():
    async def main():
        with ExitStack() as held:
            silent = held.enter_context(socket.socket())
            silent.bind((LOOPBACK, 0))  # somebody has the port, and nobody listens
            stop = never()
            waiting = asyncio.ensure_future(find(cluster(silent.getsockname()[1]), stop, settings=LONG))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not waiting.done()
            stop.set_result((7, "asked to"))
            assert await waiting == Over(7, "asked to")

    within_bound(main())


def test_one_that_was_in_the_job_before_does_not_found_a_second_one():
    async def main():
        port = free_port()
        found = await find(cluster(port), never(), former=Former(), settings=LONG)
        assert isinstance(found, Over)
        assert found.exit_code == 1
        assert "no leader is reachable" in found.reason
        with socket.socket() as sock:  # nobody has the port
            sock.bind((LOOPBACK, port))

    within_bound(main())


def test_only_the_first_endpoint_is_for_founding():
    async def main():
        with socket.socket() as taken:
            taken.bind((LOOPBACK, 0))
            stop = never()
            free = free_port()
            waiting = asyncio.ensure_future(find(cluster(taken.getsockname()[1], free), stop, settings=LONG))
            with socket.socket() as sock:
                while not waiting.done():
                    done, _ = await asyncio.wait({waiting}, timeout=0.3)
                    assert not done
                    sock.bind((LOOPBACK, free))  # nobody has it
                    stop.set_result((0, ""))
                    await waiting

    within_bound(main())


def silent():
    """Return a listener that is up and answers nobody."""
    sock = socket.create_server((LOOPBACK, 0))
    sock.setblocking(False)
    return sock


def test_the_machine_of_the_only_endpoint_goes_on_searching_while_it_is_cut_off(monkeypatch):
    """It was fenced, so nobody listens at its own endpoint any more: that says nothing about the job."""
    monkeypatch.setattr(rendezvous, "_PROBE_S", 0.05)

    async def main():
        own, loop, stop = free_port(), asyncio.get_running_loop(), never()
        with silent() as unreachable:
            former = Former(listened=(LOOPBACK, own), agents=[unreachable.getsockname()])
            search = asyncio.ensure_future(find(cluster(own), stop, settings=LONG, former=former))
            for _ in range(5):
                (await loop.sock_accept(unreachable))[0].close()
            assert not search.done()
            stop.set_result((0, "enough"))
            assert (await search).reason == "enough"

    within_bound(main())


def test_the_first_endpoint_founds_no_second_job_while_another_is_too_busy_to_answer(monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.2)

    async def main():
        busy = silent()
        search = asyncio.ensure_future(find(cluster(free_port(), busy.getsockname()[1]), never(), settings=LONG))
        unanswered, _ = await asyncio.get_running_loop().sock_accept(busy)
        with unanswered, closing(Led(Founder(LOOPBACK, busy))):
            found = await search
            assert isinstance(found, Found)
            found.connection.close()
            found.listener.close()

    within_bound(main())


def test_the_first_endpoint_founds_the_job_when_another_has_been_silent_for_long(monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(rendezvous, "_DOUBT_S", 0.3)

    async def main():
        with silent() as other:
            found = await find(cluster(free_port(), other.getsockname()[1]), never(), settings=LONG)
        assert isinstance(found, Founder)
        found.listener.close()

    within_bound(main())


def test_one_that_was_in_a_job_joins_no_other():
    """Another job may have got the port of its endpoint."""

    async def main():
        founder = await find(cluster(free_port()), never(), settings=LONG)
        with closing(Led(founder, run_id="other")) as led:
            found = await find(cluster(led.server.port), never(), settings=LONG, former=Former(run_id="ours"))
            assert isinstance(found, Over)
            assert led.came == []

    within_bound(main())
