"""The nodes of a job: table and words for the status. Pure."""

from collections import Counter
from collections.abc import Iterator

from rich.table import Table

from deadpool_run.text import size
from deadpool_run.view.health import Status, ranks_per_node, ready_spares, spares_asked
from deadpool_run.view.plan import numbers
from deadpool_run.view.text import fitted, shown

_MS_PER_S = 1e3


def has_several(status: Status) -> bool:
    """Return whether the run may span several nodes."""
    return bool(status.get("coordinator"))


def spares(status: Status) -> Iterator[str]:
    """Yield the counts of ready spares; if there are several nodes, of spare nodes and of other spare workers."""
    if not has_several(status):
        yield f"spares {len(ready_spares(status))} of {spares_asked(status)} ready"
        return
    run = status.get("run", {})
    ready = Counter(str(spare.get("node")) for spare in ready_spares(status))
    spare_nodes = [str(node.get("node")) for node in status.get("nodes", ()) if not node.get("ranks")]
    whole = [node for node in spare_nodes if ready[node] >= max(1, ranks_per_node(status))]
    nodes, workers = len(whole), sum(count for node, count in ready.items() if node not in whole)
    nodes_asked, workers_asked = int(run.get("spare_nodes", 0)), int(run.get("spares", 0))
    if nodes_asked or nodes:
        yield f"spare nodes {_of(nodes, nodes_asked)}"
    if workers_asked or workers or not (nodes_asked or nodes):
        yield f"spare workers {_of(workers, workers_asked)}"


def _of(ready: int, asked: int) -> str:
    return f"{ready} of {asked} ready" if ready <= asked else f"{ready} ready, {asked} asked for"


def words(status: Status) -> Iterator[str]:
    """Yield the words for the first line of a status."""
    if not has_several(status):
        return
    leads = status["coordinator"]
    yield f"nodes {len(status.get('nodes', ()))}"
    yield f"led by {shown(leads.get('node'))} (term {shown(leads.get('term'))})"
    if (exposed_ms := status.get("exposed_ms")) is not None:
        yield f"copies incomplete for {exposed_ms / _MS_PER_S:.1f} s"


def nodes_table(status: Status, width: int | None = None) -> Table:
    """Return the table of nodes: ranks, copies held, last heartbeat, traffic of copies. `width`: what the table may take."""
    rows = []
    leads = status["coordinator"].get("node")
    for node in status.get("nodes", ()):
        name, copies = node.get("node"), node.get("copies") or {}
        ranks = numbers(node.get("ranks") or ())
        rows.append(
            (
                shown(name),
                f"{shown(node.get('address'))}:{shown(node.get('port'))}",
                f"ranks {ranks}" if ranks else "spare",
                numbers(node.get("copies_of") or ()) or "-",
                "leads" if name == leads else _ago(node.get("silent_ms")),
                *(size(copies.get(key)) for key in ("sent_bytes", "received_bytes")),
                *(size(copies.get(key)) for key in ("sent_bytes_per_s", "received_bytes_per_s")),
            )
        )
    left = ("node", "address", "ranks", "copies of")
    columns = (*left, "heard", "sent", "received", "sent/s", "received/s")
    can_go = ("sent", "received", "sent/s", "received/s", "address")
    return fitted(columns, rows, left=left, width=width, can_go=can_go, wraps={"ranks": 12, "copies of": 12})


def _ago(silent_ms: float | None) -> str:
    return "-" if silent_ms is None else f"{silent_ms / _MS_PER_S:.1f} s ago"
