"""The store serves the processes of its user, wherever they are, and nobody else. Hosts are network namespaces."""

import os
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from kit import netns
from kit.callers import HELLO, NOBODY, PING, REFUSED, SERVED, SET, caller

from deadpool_run.store import socket_owner
from deadpool_run.store.socket_owner import SocketOwners
from deadpool_run.wire.stores import CallersIdentified, IdentifyCallers, StoreRefused

LIMIT_S = 60
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")


@pytest.fixture
def hosts():
    if reason := netns.refused():
        pytest.skip(reason)
    made = netns.Hosts(2)
    yield made
    made.close()


@needs_root
def test_a_process_of_another_user_is_refused_and_counted(house):
    with caller(house.address, uid=NOBODY) as stranger:
        assert stranger.stdout.readline() == REFUSED
    assert house.told() == StoreRefused(1, "127.0.0.1", f"its process belongs to user {NOBODY}")
    assert house.client().num_keys() == 0
    with caller(house.address) as own:
        assert own.stdout.readline() == SERVED
    assert house.client().num_keys() == 1


def test_another_protocol_is_refused_and_counted(house):
    with socket.create_connection(house.address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert not sock.recv(100)
    assert house.told().reason.startswith("it does not begin as a TCPStore client")


@pytest.fixture
def far(hosts, serve):
    """A store on host 0 and a connection from host 1, which has sent a request."""
    house = serve(netns.on_host(hosts, 0, lambda: socket.create_server((hosts.addresses[0], 0))))
    with netns.on_host(hosts, 1, lambda: socket.create_connection(house.address)) as sock:
        sock.settimeout(LIMIT_S)
        sock.sendall(HELLO + SET + PING)
        yield house, sock


def test_a_caller_from_elsewhere_is_served_when_its_machine_knows_it(far):
    house, sock = far
    asked = house.told()
    assert asked == IdentifyCallers(*house.address, asked.callers)
    assert [(caller.address, caller.port) for caller in asked.callers] == [sock.getsockname()]
    house.tell(CallersIdentified((asked.callers[0].number + 1,), (asked.callers[0].number + 2,)))  # of other processes
    house.tell(CallersIdentified((asked.callers[0].number,), ()))
    assert sock.recv(100) == PING[1:]


def test_a_caller_from_elsewhere_is_refused_when_its_machine_does_not_know_it(far):
    house, sock = far
    number = house.told().callers[0].number
    house.tell(CallersIdentified((), (number,)))
    with pytest.raises(ConnectionResetError):  # for what was not read
        sock.recv(100)
    assert house.told() == StoreRefused(
        1, sock.getsockname()[0], "no process of the job's user on that machine made it"
    )
    house.tell(CallersIdentified((number,), ()))  # too late


def test_a_caller_of_whom_nobody_says_anything_is_refused(hosts, serve):
    house = serve(netns.on_host(hosts, 0, lambda: socket.create_server((hosts.addresses[0], 0))), answer_s=0.1)
    with netns.on_host(hosts, 1, lambda: socket.create_connection(house.address)) as sock:
        sock.settimeout(LIMIT_S)
        assert not sock.recv(100)
        assert isinstance(house.told(), IdentifyCallers)
        assert house.told().reason == "its machine did not answer within 0.1 s"


def test_a_caller_that_has_hung_up_is_not_counted(hosts, serve):
    house = serve(netns.on_host(hosts, 0, lambda: socket.create_server((hosts.addresses[0], 0))))
    with netns.on_host(hosts, 1, lambda: socket.create_connection(house.address)):
        number = house.told().callers[0].number
    with netns.on_host(hosts, 1, lambda: socket.create_connection(house.address)):
        house.tell(CallersIdentified((), (number,)))  # the first has gone
        other = house.told()
        assert isinstance(other, IdentifyCallers)
        house.tell(CallersIdentified((), (other.callers[0].number,)))
        assert house.told().count == 1


def test_torchs_client_calls_again_until_it_is_known(hosts, serve):
    house = serve(netns.on_host(hosts, 0, lambda: socket.create_server((hosts.addresses[0], 0))))

    def call():
        store = dist.TCPStore(
            *house.address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
        )
        store.set("key", "value")
        return store.get("key")

    got = []
    client = threading.Thread(target=lambda: got.append(netns.on_host(hosts, 1, call)))
    client.start()
    house.tell(CallersIdentified((), (house.told().callers[0].number,)))
    while not isinstance(asked := house.told(), IdentifyCallers):
        pass
    house.tell(CallersIdentified((asked.callers[0].number,), ()))
    client.join(LIMIT_S)
    assert got == [b"value"]


@pytest.fixture(params=["netlink", "proc"])
def owners(request, monkeypatch):
    if request.param == "proc":  # as where a sandbox has no netlink
        monkeypatch.setattr(socket_owner, "_NETLINK_SOCK_DIAG", 31)
    asked = SocketOwners()
    assert (asked._netlink is None) == (request.param == "proc")
    yield asked
    asked.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_the_kernel_knows_who_has_the_other_end(owners, address):
    served = "127.0.0.1" if "." in address else address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((served, 0), family=socket.AF_INET if "." in served else family) as listener,
        socket.socket(family) as calling,
    ):
        called = listener.getsockname()[:2]
        calling.connect((address, called[1]))
        accepted, where = listener.accept()
        assert owners.uid(where[:2], called) == os.getuid()
        assert owners.uid(called, where[:2]) == os.getuid()
        assert owners.uid((where[0], called[1]), called) is None  # a listener is no caller
        calling.close()
        assert owners.uid(where[:2], called) is None  # it may be anybody's
        accepted.close()


@needs_root
def test_the_kernel_names_other_users(owners, house):
    with socket.create_server(("127.0.0.1", 0)) as listener, caller(listener.getsockname(), uid=NOBODY):
        accepted, where = listener.accept()
        assert owners.uid(where, listener.getsockname()) == NOBODY
        accepted.close()
