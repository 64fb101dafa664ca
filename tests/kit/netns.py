"""Network namespaces on one bridge, as the hosts of one network. Needs root, or the right to make namespaces."""

import ctypes
import itertools
import os
import subprocess
import threading
from pathlib import Path

import torch.distributed as dist

from kit.world import TIMEOUT, World, _context, _main

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def refused():
    """Return why this machine refuses a namespace; None if it does not."""
    probe = f"dp{os.getpid():x}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"cannot make a network namespace: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


class Hosts:
    """`count` namespaces with addresses 10.91.0.1 and up; `cut` makes one of them silent."""

    def __init__(self, count):
        base = f"dp{os.getpid():x}n{next(_numbers)}"
        self.hub = f"{base}hub"
        self.names = [f"{base}h{host}" for host in range(count)]
        self.addresses = [f"10.91.0.{host + 1}" for host in range(count)]
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.hub, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("-n", self.hub, "link", "add", f"p{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self.hub, "link", "set", f"p{host}", "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")

    def cut(self, host):
        """Drop every packet from and to the host, without an error to anyone."""
        _ip("-n", self.hub, "link", "set", f"p{host}", "nomaster")

    def mend(self, host):
        """Undo `cut`."""
        _ip("-n", self.hub, "link", "set", f"p{host}", "master", "bridge")

    def separate(self, one, other):
        """Drop every packet between two hosts, without an error to either. Each still reaches the other hosts."""
        for host, peer in ((one, other), (other, one)):
            nobody = ("neigh", "replace", self.addresses[peer], "lladdr", "02:00:00:00:00:01")
            _ip("-n", self.names[host], *nobody, "dev", "eth0", "nud", "permanent")

    def reject(self, host, *, undo=False):
        """Answer every packet from and to the host with a reset, as a firewall does. `undo` lets packets through again.

        Each host gets the other's address as a local one, where nothing listens.
        """
        for other, address in enumerate(self.addresses):
            if other != host:
                for here, there in ((host, address), (other, self.addresses[host])):
                    route = ("route", "del" if undo else "add", "local", there, "dev", "lo", "table", "local")
                    _ip("-n", self.names[here], *route)

    def part(self, hosts):
        """Split the network into these hosts and the others, without an error to anyone."""
        _ip("-n", self.hub, "link", "add", "other", "type", "bridge")
        _ip("-n", self.hub, "link", "set", "other", "up")
        for host in hosts:
            _ip("-n", self.hub, "link", "set", f"p{host}", "master", "other")

    def close(self):
        """Remove them."""
        for name in (*self.names, self.hub):
            _ip("netns", "del", name)


def enter(namespace):
    """Move this thread, and those that it starts later, into the namespace."""
    with Path(f"/run/netns/{namespace}").open() as handle:
        if _libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


class NetworkWorld(World):
    """A world whose ranks live on hosts: rank r on host r, the store on host 0."""

    def __init__(self, size, hosts):
        self.size = size
        self.hosts = hosts
        self.handles = []
        mine, theirs = _context.Pipe()
        self._keeper = _context.Process(target=_keep_store, args=(theirs, hosts.names[0], hosts.addresses[0]))
        self._keeper.start()
        theirs.close()
        self._let_go = mine
        assert mine.poll(TIMEOUT.total_seconds())
        self._port = mine.recv()

    def start(self, rank, target, *args, prefix="e1", host=None):
        """Start one process."""
        home = rank if host is None else host
        place = (self._port, rank, self.size, prefix, self.hosts.addresses[0])
        return self._start(_main_on, self.hosts.names[home], self.hosts.addresses[home], place, target, args)

    def close(self):
        """End all processes, also the one with the store."""
        super().close()
        self._let_go.close()
        self._keeper.join(TIMEOUT.total_seconds())
        self._keeper.close()


def _main_on(pipe, namespace, address, *rest):
    enter(namespace)
    os.environ["DEADPOOL_NODE_ADDR"] = address
    _main(pipe, *rest)


def _keep_store(pipe, namespace, address):
    enter(namespace)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    pipe.send(store.port)
    pipe.poll(None)  # until the test closes its end


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def on_host(hosts, host, make):
    """Return the result of `make`, called on a thread in the host's network namespace."""
    made = []

    def live():
        enter(hosts.names[host])
        made.append(make())

    thread = threading.Thread(target=live)
    thread.start()
    thread.join()
    return made[0]
