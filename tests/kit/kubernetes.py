"""A small API server with Kubernetes' rules for Leases, over HTTPS.

It is not Kubernetes. Its rules come from the API's documentation and from the server's source: pkg/apis/coordination
(`validation.go`), pkg/registry/coordination/lease (its strategy refuses unconditional updates, and updates of absent
objects), and apiserver/pkg/registry/generic/registry/store.go (resource versions).
"""

import json
import re
import ssl
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "a-service-account's-token"
NAMESPACE = "training"
_PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([^/]+)/leases(?:/([^/]+))?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"(?:(?=[^/]{1,253}/)[a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
_VERBS = {"GET": "get", "POST": "create", "PUT": "update"}
_OWN_METADATA = {"uid", "creationTimestamp", "resourceVersion", "namespace", "managedFields"}


class RefusalError(Exception):
    def __init__(self, code, reason, message):
        super().__init__(message)
        self.code, self.reason = code, reason


class KubernetesApi:
    """Serves until `close`. `home` becomes the folder of the service account; `folder` has server.key and server.crt."""

    def __init__(self, home: Path, folder: Path):
        self.verbs = {"get", "create", "update"}
        self.leases = {}
        self.conflicts = 0
        self.answers_to_lose = 0
        """The number of changing requests from now on that are performed, but not answered."""
        self._version = 1000
        self._lock = threading.Lock()
        home.mkdir()
        (home / "token").write_text(TOKEN + "\n")
        (home / "namespace").write_text(NAMESPACE)
        (home / "ca.crt").write_bytes((folder / "server.crt").read_bytes())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method, path, token, body):
        """Return the status and content of the answer; None if the answer is lost."""
        with self._lock:
            try:
                status, lease = self._serve(method, path, token, body)
            except RefusalError as error:
                self.conflicts += error.code == 409
                status = error.code
                lease = {
                    "kind": "Status",
                    "status": "Failure",
                    "reason": error.reason,
                    "message": str(error),
                    "code": status,
                }
            if method != "GET" and self.answers_to_lose:
                self.answers_to_lose -= 1
                return None
            return status, json.loads(json.dumps(lease))

    def _serve(self, method, path, token, body):
        match = _PATH.fullmatch(path)
        if token != f"Bearer {TOKEN}":
            raise RefusalError(401, "Unauthorized", "Unauthorized")
        if match is None or method not in _VERBS or bool(match[2]) != (method != "POST"):
            raise RefusalError(404, "NotFound", "the server could not find the requested resource")
        namespace, name = match[1], match[2]
        if namespace != NAMESPACE or _VERBS[method] not in self.verbs:
            who = f"system:serviceaccount:{NAMESPACE}:default"
            what = f'cannot {_VERBS[method]} resource "leases" in API group "coordination.k8s.io" in the namespace "{namespace}"'
            raise RefusalError(403, "Forbidden", f'leases.coordination.k8s.io is forbidden: User "{who}" {what}')
        if method == "GET":
            return 200, self._lease(name)
        given = self._valid(body)
        metadata = given["metadata"]
        if method == "POST":
            return 201, self._create(given, metadata)
        return 200, self._update(given, metadata, name)

    def _create(self, given, metadata):
        name = metadata["name"]
        if metadata.get("resourceVersion"):
            raise RefusalError(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if name in self.leases:
            raise RefusalError(409, "AlreadyExists", f'leases.coordination.k8s.io "{name}" already exists')
        own = {"namespace": NAMESPACE, "uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z"}
        return self._store(given, {**metadata, **own, "managedFields": [{"manager": "test", "operation": "Update"}]})

    def _update(self, given, metadata, name):
        if metadata["name"] != name:
            raise RefusalError(400, "BadRequest", "the name of the object does not match the name on the URL")
        if not metadata.get("resourceVersion"):
            what = "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update"
            raise RefusalError(422, "Invalid", f'Lease "{name}" is invalid: {what}')
        before = self._lease(name)["metadata"]
        if (
            metadata["resourceVersion"] != before["resourceVersion"]
            or metadata.get("uid", before["uid"]) != before["uid"]
        ):
            what = "the object has been modified; please apply your changes to the latest version and try again"
            raise RefusalError(409, "Conflict", f'Operation cannot be fulfilled on leases "{name}": {what}')
        return self._store(given, {**metadata, **{key: before[key] for key in _OWN_METADATA}})

    def _store(self, given, metadata):
        self._version += 1
        stored = {**given, "metadata": {**metadata, "resourceVersion": str(self._version)}}
        self.leases[metadata["name"]] = stored
        return stored

    def _lease(self, name):
        if name not in self.leases:
            raise RefusalError(404, "NotFound", f'leases.coordination.k8s.io "{name}" not found')
        return self.leases[name]

    @staticmethod
    def _valid(body):
        given = json.loads(body)
        if (given.get("apiVersion"), given.get("kind")) != ("coordination.k8s.io/v1", "Lease"):
            raise RefusalError(400, "BadRequest", "no kind matches")
        metadata, spec = given["metadata"], given.get("spec", {})
        invalid = [
            *(["metadata.name"] if not _SUBDOMAIN.fullmatch(metadata["name"]) else []),
            *(
                key
                for key, value in metadata.get("annotations", {}).items()
                if not _NAME.fullmatch(key) or not isinstance(value, str)
            ),
            *(
                key
                for key, value in metadata.get("labels", {}).items()
                if not _NAME.fullmatch(key) or not _LABEL.fullmatch(value)
            ),
            *(key for key, value in spec.items() if key not in _FIELDS or not _FIELDS[key](value)),
        ]
        if invalid:
            raise RefusalError(422, "Invalid", f'Lease "{metadata["name"]}" is invalid: {", ".join(invalid)}')
        return given


def _int32(value, smallest):
    return isinstance(value, int) and smallest <= value < 1 << 31


_FIELDS = {
    "holderIdentity": lambda value: isinstance(value, str) and value != "",
    "leaseDurationSeconds": lambda value: _int32(value, 1),
    "leaseTransitions": lambda value: _int32(value, 0),
    "acquireTime": lambda value: _MICRO_TIME.fullmatch(value) is not None,
    "renewTime": lambda value: _MICRO_TIME.fullmatch(value) is not None,
}


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # server_close waits for them

    def handle_error(self, request, client_address):
        """Print nothing: tests kill clients."""


def _handler(api):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 20

        def _handle(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = api.answer(self.command, self.path, self.headers.get("Authorization"), body)
            self.close_connection = True
            if answer is None:
                return
            text = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = _handle  # noqa: N815 - http.server's names

        def log_message(self, *_):
            pass

    return Handler
