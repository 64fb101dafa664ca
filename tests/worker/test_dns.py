"""Name servers that do not answer cost a repair little. The host is a network namespace."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit import netns
from kit.world import LIMIT_S

STORE = """
import socket, sys
from deadpool_run.store.main import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""
CLIENT = """
import sys, time
from deadpool_run.worker import dns
from deadpool_run.worker.compat import c10d
before = dns._state_of_thread()
patience = before.retrans, before.retry
start = time.monotonic()
store = c10d.open_store(sys.argv[1], int(sys.argv[2]))
store.set("key", "value")
print(time.monotonic() - start, flush=True)
after = dns._state_of_thread()
assert (after.retrans, after.retry) == patience
sys.stdin.read()
"""


@pytest.fixture
def hosts():
    """Host 0, whose name server is on host 1 and never answers; that server's socket."""
    if reason := netns.refused():
        pytest.skip(reason)
    made = netns.Hosts(2)
    settings = Path("/etc/netns", made.names[0])
    settings.mkdir(parents=True)
    (settings / "resolv.conf").write_text(f"nameserver {made.addresses[1]}\n")
    with netns.on_host(made, 1, lambda: socket.socket(type=socket.SOCK_DGRAM)) as silent:
        silent.bind((made.addresses[1], 53))
        silent.setblocking(False)
        yield made, silent
    shutil.rmtree(settings)
    made.close()


def python_on(hosts, code, *args, **options):
    # `ip netns exec` gives it the host's own resolv.conf.
    command = ["ip", "netns", "exec", hosts.names[0], sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, text=True, **options)


def questions(server):
    count = 0
    while True:
        try:
            server.recv(1 << 12)
        except BlockingIOError:
            return count
        count += 1


def keeps_alive(port, hosts):
    """Whether the kernel has a keep-alive timer for each connection that the store accepted."""
    lines = netns.on_host(hosts, 0, lambda: Path("/proc/thread-self/net/tcp").read_text()).splitlines()[1:]
    accepted = [line.split() for line in lines if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01"]
    return len(accepted), {timer.partition(":")[0] for *_, timer in (words[:6] for words in accepted)}


def test_nobody_waits_long_for_names(hosts):
    hosts, name_server = hosts
    address = hosts.addresses[0]
    ours, theirs = socket.socketpair()
    listener = netns.on_host(hosts, 0, lambda: socket.create_server((address, 0)))
    fds = (theirs.fileno(), listener.fileno())
    port = listener.getsockname()[1]
    with python_on(hosts, STORE, *fds, pass_fds=fds) as store, ours:
        theirs.close()
        listener.close()
        ours.settimeout(LIMIT_S)
        assert b"StoreListening" in ours.recv(1000)
        assert questions(name_server) == 0
        with python_on(hosts, CLIENT, address, port, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            assert float(client.stdout.readline()) < 3  # ten seconds if left alone
            assert keeps_alive(port, hosts) == (1, {"02"})
            client.communicate(timeout=LIMIT_S)
        assert client.returncode == 0
        assert questions(name_server) <= 1
        ours.close()
        assert store.wait(LIMIT_S) == 0
