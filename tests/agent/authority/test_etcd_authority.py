"""Claims in a real etcd that is killed and started again, loses answers, or wants a login and certificates."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kit.claimers import Claimers

from deadpool_run.agent.authority.claim import LeaderClaim
from deadpool_run.agent.authority.parse import parse_authority
from deadpool_run.errors import AuthorityError, UsageError


def claim(term, node="n"):
    return LeaderClaim(term, node, "10.0.0.1", 29400, "run")


def at(*ports, environment=(), scheme="etcd", prefix=""):
    places = ",".join(f"127.0.0.1:{port}" for port in ports)
    return parse_authority(f"{scheme}://{places}{prefix}", "run", dict(environment))


@contextmanager
def closed_port():
    """A port that refuses connections, as long as it is bound."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@contextmanager
def losing_answers(etcd, count):
    """A server in front of etcd that passes everything on, and loses the first answers to transactions."""
    lost = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = etcd.ask(self.path, **body)
            if self.path.endswith("/txn") and len(lost) < count:
                lost.append(self.path)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()
    assert len(lost) == count


def test_claims_survive_the_death_of_etcd(etcd_server):
    etcd = etcd_server()
    with Claimers(f"etcd://127.0.0.1:{etcd.port}", "run") as claimers:
        claimers.start("a", "b", "c")
        claimers.order("race 1000000")
        for _ in range(3):
            enough = len(claimers.wins) + 20
            while len(claimers.wins) < enough:
                claimers.report()
            etcd.kill()
            etcd.start()
        enough = len(claimers.wins) + 20
        while len(claimers.wins) < enough:
            claimers.report()
    assert at(etcd.port).read().claim.term >= max(term for term, _ in claimers.wins)


def test_a_claim_whose_answer_was_lost_is_granted_when_it_is_made_again(etcd_server):
    etcd = etcd_server()
    with losing_answers(etcd, 1) as port:
        authority = at(port)
        with pytest.raises(AuthorityError, match="cannot claim term 0"):
            authority.claim(claim(0))
        assert authority.read().claim == claim(0)
        assert authority.claim(claim(0))


def test_a_claim_whose_answer_was_lost_is_granted_at_the_next_endpoint(etcd_server):
    etcd = etcd_server()
    with losing_answers(etcd, 1) as port:
        assert at(port, etcd.port).claim(claim(0))


def test_endpoints_are_tried_in_turn(etcd_server):
    etcd = etcd_server()
    with closed_port() as refuses, socket.create_server(("127.0.0.1", 0)) as silent:
        authority = at(refuses, silent.getsockname()[1], etcd.port)
        assert authority.claim(claim(0))
        assert authority.read().claim == claim(0)


def test_an_etcd_that_cannot_be_reached_is_an_error_that_says_what_to_do():
    with closed_port() as port, pytest.raises(AuthorityError) as caught:
        at(port, prefix="/jobs").claim(claim(7))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"cannot claim term 7 at etcd://127.0.0.1:{port}/jobs: 127.0.0.1:{port}: ")
    assert "refused" in lines[0]
    assert "etcdctl endpoint health" in lines[1]


def test_prefixes_are_separate(etcd_server):
    port = etcd_server().port
    assert at(port, prefix="/one/").claim(claim(3))
    assert at(port, prefix="/two").read().claim is None
    assert at(port, prefix="/one").read().claim == claim(3)


def test_a_login_is_used(etcd_server):
    etcd = etcd_server()
    etcd.ask("/v3/auth/role/add", name="root")
    etcd.ask("/v3/auth/role/add", name="jobs")
    own = {"permType": "READWRITE", "key": "am9icy8=", "range_end": "am9iczA="}  # jobs/ to jobs0
    etcd.ask("/v3/auth/role/grant", name="jobs", perm=own)
    for name in ("root", "jobs"):
        etcd.ask("/v3/auth/user/add", name=name, password="pw:1")
        etcd.ask("/v3/auth/user/grant", user=name, role=name)
    etcd.ask("/v3/auth/enable")
    assert at(etcd.port, prefix="/jobs", environment={"ETCDCTL_USER": "jobs:pw:1"}).claim(claim(0))
    apart = {"ETCDCTL_USER": "jobs", "ETCDCTL_PASSWORD": "pw:1"}
    assert at(etcd.port, prefix="/jobs", environment=apart).read().claim == claim(0)
    for environment, prefix, why in [
        ({}, "/jobs", "user name is empty"),
        ({"ETCDCTL_USER": "jobs:pw"}, "/jobs", "authentication failed"),
        (apart, "/others", "permission denied"),
    ]:
        with pytest.raises(AuthorityError, match=rf"HTTP .*{why}[^$]*ETCDCTL_USER"):
            at(etcd.port, prefix=prefix, environment=environment).claim(claim(1))


def test_certificates_are_checked(etcd_server, certificates):
    etcd = etcd_server(tls=certificates)
    trusting = {"ETCDCTL_CACERT": str(certificates / "server.crt")}
    assert at(etcd.port, scheme="etcds", environment=trusting).claim(claim(0))
    with pytest.raises(AuthorityError, match="CERTIFICATE_VERIFY_FAILED"):
        at(etcd.port, scheme="etcds").read()
    with pytest.raises(AuthorityError, match="cannot read the run's record"):
        at(etcd.port).read()


def test_certificates_that_cannot_be_read_are_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="ETCDCTL_CACERT"):
        at(1, scheme="etcds", environment={"ETCDCTL_CACERT": str(tmp_path / "absent.pem")})
