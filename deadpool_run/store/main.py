"""Entry point of the store's process, which serves until the agent closes its control socket."""

import socket
from pathlib import Path

from deadpool_run.store.server import StoreServer
from deadpool_run.wire.messages import encode
from deadpool_run.wire.stores import StoreListening

PROCESS_NAME = "deadpool-store"
"""As `ps` and `top` show it; up to 15 characters."""
_IDLE_S = 30
_UNANSWERED_MS = 120_000


def main(control_fd: int, listener_fd: int) -> None:
    """Serve on the agent's listening socket, whose port outlives this process, until the agent closes the control socket."""
    Path("/proc/self/comm").write_text(PROCESS_NAME, encoding="ascii")
    control = socket.socket(fileno=control_fd)
    listener = socket.socket(fileno=listener_fd)
    # The kernel ends connections whose other host has vanished silently. Accepted sockets inherit these options.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    server = StoreServer(listener, control)
    control.sendall(encode(StoreListening(listener.getsockname()[1])))
    server.serve()
