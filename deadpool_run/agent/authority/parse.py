"""The value of `--authority` as an external authority. Nothing is asked before its first use."""

import os
from collections.abc import Mapping
from pathlib import Path

from deadpool_run.agent.authority.bounded import BoundedAuthority
from deadpool_run.agent.authority.file_authority import FileAuthority
from deadpool_run.errors import UsageError

AGENTS = "agents"
"""No external authority: the agents decide among themselves."""
_FORMS = "agents, file:/DIR, etcd://HOST:PORT or k8s:[NAMESPACE/]NAME"


def parse_authority(text: str, run_id: str, environment: Mapping[str, str] = os.environ) -> BoundedAuthority | None:
    """Return the authority for a run; None for `agents`. Raises `UsageError`: why, and on a second line what to write."""
    if text == AGENTS:
        return None
    kind, _, rest = text.partition(":")
    if kind == "file":
        if not rest.startswith("/"):
            raise UsageError("not an absolute path\nwrite file:/DIR, with a folder on a disk that all machines share")
        return BoundedAuthority(FileAuthority(Path(rest), run_id), run_id)
    if kind in {"etcd", "etcds"}:
        from deadpool_run.agent.authority import etcd_authority  # noqa: PLC0415 - ssl, http.client: 15 ms of each launch

        return BoundedAuthority(etcd_authority.parse(rest, run_id, environment, tls=kind == "etcds"), run_id)
    if kind == "k8s":
        from deadpool_run.agent.authority import kubernetes_authority  # noqa: PLC0415 - as above

        return BoundedAuthority(kubernetes_authority.parse(rest, run_id, environment), run_id)
    raise UsageError(f"not an authority\nwrite {_FORMS}")
