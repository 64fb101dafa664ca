"""The start values that all nodes of a job must share, compared when a node joins."""

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path

from deadpool_run.agent.authority.parse import AGENTS
from deadpool_run.agent.console import installed_version
from deadpool_run.agent.spec import LaunchSpec

_DIGEST_CHARACTERS = 12
_NOTHING = "none"
_RUN = "--run-id"


def identity_of(spec: LaunchSpec) -> dict[str, str]:
    """Return the values by their names in messages. A path may differ between machines; what the script contains may not."""
    target, authority = spec.target, None if spec.cluster is None else spec.cluster.authority
    found = {
        **({_RUN: spec.run_id} if spec.named else {}),
        "--nproc-per-node": str(spec.nproc_per_node),
        "--authority": AGENTS if authority is None else authority.where,
        "script": Path(target.argv[0]).name,
        **{f"argument {number}": word for number, word in enumerate(target.argv[1:], 1)},
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{package: installed_version(package) for package in ("torch", "deadpool-run")},
    }
    if spec.script is not None:
        found["the script's SHA-256"] = hashlib.sha256(spec.script).hexdigest()[:_DIGEST_CHARACTERS]
    return found


def difference(node: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return why a node with `theirs` cannot join; empty if it can. A node that names no run joins any."""
    for name in dict.fromkeys((*ours, *theirs)):
        our = ours.get(name, _NOTHING)
        their = theirs.get(name, our if name == _RUN else _NOTHING)
        if their != our:
            return f"{name} is {their} on node {node}, but {our} in the job: start every node with the same"
    return ""
