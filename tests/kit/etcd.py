"""A real etcd on loopback ports, in its own folder. It can be killed and started again."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

from deadpool_run.agent.authority.json_http import HttpServer

READY_S = 30.0


def binary():
    """Return the path of etcd: DEADPOOL_TEST_ETCD, or else the one in PATH. None if there is none."""
    return os.environ.get("DEADPOOL_TEST_ETCD") or shutil.which("etcd")


def _free_ports(count):
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


class Etcd:
    """A cluster of one member. If `tls` is given, a folder of `kit.certificate`, clients use HTTPS.

    If `namespace` is given, etcd runs in that network namespace, at `address`.
    """

    def __init__(self, home: Path, tls: Path | None = None, address: str = "127.0.0.1", namespace: str = ""):
        self._home = home
        self._tls = tls
        self._address = address
        self._enter = ["ip", "netns", "exec", namespace] if namespace else []
        self.port, self._peer_port = _free_ports(2)
        self._process = None
        self.start()

    def start(self):
        """Start it, and wait until it reports that it is ready (sd_notify(3))."""
        scheme = "http" if self._tls is None else "https"
        client, peer = f"{scheme}://{self._address}:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        ready = self._home / "ready"
        ready.unlink(missing_ok=True)
        tls = (
            []
            if self._tls is None
            else ["--cert-file", self._tls / "server.crt", "--key-file", self._tls / "server.key"]
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, (self._home / "log").open("ab") as log:
            notices.bind(str(ready))
            notices.settimeout(READY_S)
            self._process = subprocess.Popen(
                [
                    *(*self._enter, binary(), "--name", "m", "--data-dir", self._home / "data"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"m={peer}", "--logger", "zap", *tls),
                ],
                env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(ready)},
                stdout=log,
                stderr=log,
            )
            try:
                assert b"READY=1" in notices.recv(1024)
            except BaseException:
                self.kill()
                raise

    def kill(self):
        """Kill etcd with SIGKILL."""
        self._process.kill()
        self._process.wait(READY_S)

    def ask(self, path, **body):
        """Send an administrator's request. It works only without TLS, and before logins are required."""
        status, answer = HttpServer("127.0.0.1", self.port).ask("POST", path, body, {})
        assert status == 200, answer
        return answer
