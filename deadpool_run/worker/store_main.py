"""The job's TCPStore: a process that serves rendezvous keys until the agent closes its control socket."""

import socket

from torch._C._distributed_c10d import TCPStore

from deadpool_run.wire.messages import StoreListening, encode


def main(control_fd: int, listener_fd: int) -> None:
    """Serve on the agent's listening socket, so that the port outlives this process. Returns when the agent lets go."""
    control = socket.socket(fileno=control_fd)
    listener = socket.socket(fileno=listener_fd)
    host, port = listener.getsockname()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    control.sendall(encode(StoreListening(port)))
    control.recv(1)
    del store
