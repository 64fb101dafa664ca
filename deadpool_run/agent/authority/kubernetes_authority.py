"""The record of a run in a Kubernetes Lease, through the API server's REST interface, as a pod's service account.

Each run has a Lease of its own. Its annotation holds the record; its `spec` repeats the leader for `kubectl get leases`.
The API server replaces a Lease only if `metadata.resourceVersion` is the one that was read:
https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/lease-v1/.
"""

import datetime as dt
import re
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from deadpool_run.agent.authority.claim import AuthorityRecord, LeaderClaim, from_json, name_of, to_json
from deadpool_run.agent.authority.json_http import HttpServer, checked
from deadpool_run.agent.authority.record_authority import RecordAuthority
from deadpool_run.errors import UsageError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, its namespace and the certificate of the API server."""
ANNOTATION = "deadpool-run/record"
_LABELS = {"app.kubernetes.io/managed-by": "deadpool-run"}
_K8S = re.compile(r"(?:([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)/)?([a-z0-9](?:[-a-z0-9]{0,98}[a-z0-9])?)")
"""Names in Kubernetes: DNS labels, with room for the run's name."""
_GROUP = "coordination.k8s.io/v1"


class LeaseAuthority(RecordAuthority["dict[str, Any] | None"]):
    """A run's record in a Lease. The version is the Lease as it was read, None before the first."""

    def __init__(self, host: str, port: int, namespace: str, name: str, run_id: str) -> None:
        """`namespace` is empty for the pod's own."""
        self.where = f"k8s:{namespace}/{name}" if namespace else f"k8s:{name}"
        self.advice = (
            "the pod's service account needs a Role with the verbs get, create and update on leases "
            "(apiGroups: coordination.k8s.io)"
        )
        self._host = host
        self._port = port
        self._namespace = namespace
        self._name = f"{name}-{name_of(run_id)}"

    def fetch(self) -> tuple[AuthorityRecord, dict[str, Any] | None]:
        """Return the record and its Lease."""
        status, lease = self._ask("GET", self._name, None)
        if status == HTTPStatus.NOT_FOUND:
            return AuthorityRecord(), None
        checked((status, lease))
        text = (lease["metadata"].get("annotations") or {}).get(ANNOTATION)
        if text is None:
            raise ValueError(f"the Lease {self._name} has no annotation {ANNOTATION}: something else made it")
        return from_json(text, AuthorityRecord), lease

    def swap(self, record: AuthorityRecord, version: dict[str, Any] | None) -> bool:
        """Create the Lease, or replace it as it was read; return whether it was the newest."""
        if version is None:
            metadata: dict[str, Any] = {"name": self._name, "labels": _LABELS, "annotations": {}}
            before: dict[str, Any] = {}
        else:
            metadata, before = version["metadata"], version.get("spec") or {}
        metadata = {**metadata, "annotations": {**metadata["annotations"], ANNOTATION: to_json(record)}}
        spec = before if record.claim is None else {**before, **_spec(record.claim)}
        lease = {"apiVersion": _GROUP, "kind": "Lease", "metadata": metadata, "spec": spec}
        status, answer = self._ask("POST", "", lease) if version is None else self._ask("PUT", self._name, lease)
        gone = version is not None and status == HTTPStatus.NOT_FOUND
        if status == HTTPStatus.CONFLICT or gone:
            return False
        checked((status, answer))
        return True

    def _ask(self, method: str, name: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        # Tokens expire and certificates are replaced: the kubelet writes new ones into the same files.
        tls = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
        token = (SERVICE_ACCOUNT / "token").read_text(encoding="utf-8").strip()
        namespace = self._namespace or (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        path = f"/apis/{_GROUP}/namespaces/{namespace}/leases" + (f"/{name}" if name else "")
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        return HttpServer(self._host, self._port, tls).ask(method, path, body, headers)


def parse(text: str, run_id: str, environment: Mapping[str, str]) -> LeaseAuthority:
    """Return the authority at `[NAMESPACE/]NAME`, as this process's pod reaches it. Raises `UsageError`."""
    match = _K8S.fullmatch(text)
    if match is None:
        raise UsageError(
            "not the name of a Lease\nwrite k8s:NAME or k8s:NAMESPACE/NAME, in lower-case letters, digits and dashes"
        )
    host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host or not port.isdecimal():
        raise UsageError(
            "this process is not in a pod of Kubernetes (KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not "
            "set)\nstart it in a pod, or choose another authority"
        )
    return LeaseAuthority(host, int(port), match[1] or "", match[2], run_id)


def _spec(claim: LeaderClaim) -> dict[str, Any]:
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people; nothing compares it
    return {"holderIdentity": str(claim.node), "leaseTransitions": claim.term, "acquireTime": now, "renewTime": now}
