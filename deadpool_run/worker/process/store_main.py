"""The process of the job's TCPStore, which serves until the agent closes its control socket."""

import socket

from deadpool_run.wire.messages import StoreListening, encode
from deadpool_run.worker import dns
from deadpool_run.worker.compat import c10d

_IDLE_S = 30
_UNANSWERED_MS = 120_000


def main(control_fd: int, listener_fd: int) -> None:
    """Serve on the agent's listening socket, whose port outlives this process, until the agent closes the control socket."""
    dns.disable()
    control = socket.socket(fileno=control_fd)
    listener = socket.socket(fileno=listener_fd)
    # The kernel ends connections whose other host has vanished silently. Accepted sockets inherit these options.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    host, port = listener.getsockname()
    store = c10d.serve_store(host, port, listener.detach())
    control.sendall(encode(StoreListening(port)))
    control.recv(1)
    del store
