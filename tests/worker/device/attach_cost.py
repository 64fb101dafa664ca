"""The cost of one attach at many ranks, computed; `python tests/worker/device/attach_cost.py` writes the table of docs/gpu.md.

Gloo's part is what `test_attach_cost` counts in small groups: each rank of n writes its addresses once, 154 + 8 n bytes, reads those of
all n, and has a socket to each other one.
"""

from pathlib import Path

from deadpool_run.wire import typed
from deadpool_run.worker.groups import connect

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
BEGIN, END = "<!-- cost: made by `python tests/worker/device/attach_cost.py` -->", "<!-- end of the cost -->"
WORLDS = (64, 512, 4096)
NODE = 8


def address_bytes(ranks):
    """Return how long the addresses of one rank of a group are in the store."""
    return 154 + 8 * ranks


def groups(world):
    """Return the sizes of a rank's groups: the world, tensor parallelism in a node, data parallelism across nodes."""
    return world, NODE, world // NODE


def mesh_reads(world, sizes):
    """Return how many entries all ranks read from the store to connect these groups over Gloo."""
    return sum(world * size for size in sizes)


def mesh_bytes(world, sizes):
    """Return the bytes of that."""
    return sum(world * size * address_bytes(size) for size in sizes)


def announcement_bytes():
    """Return how long a member's announcement is, with the handles of three communicators of `ProcessGroupNCCL2`."""
    handle = f"nccl2:4095:-1:{'0' * 16}:"
    return len(typed.to_json(connect._Member(("10.0.0.100", 40000), ["0", "1", "2"], False, (handle,) * 3)))


def _size(nbytes):
    for unit, shift in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= shift:
            return f"{nbytes / shift:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def table():
    """Return the table in Markdown."""
    lines = [f"| | {' | '.join(f'{world:,} ranks' for world in WORLDS)} |", "| --- " * (len(WORLDS) + 1) + "|"]

    def row(what, value):
        lines.append(f"| {what} | {' | '.join(str(value(world)) for world in WORLDS)} |")

    row("rendezvous: keys that are read from the store, by all ranks", lambda world: f"{2 * world:,}")
    row("rendezvous: bytes of these", lambda world: _size(world * world * announcement_bytes()))
    row("Gloo: entries that are read, by all ranks", lambda world: f"{mesh_reads(world, groups(world)):,}")
    row("Gloo: bytes of these", lambda world: _size(mesh_bytes(world, groups(world))))
    row("of which the world's group", lambda world: _size(mesh_bytes(world, groups(world)[:1])))
    row("Gloo: sockets of one rank", lambda world: f"{sum(size - 1 for size in groups(world)):,}")
    return "\n".join(lines)


def with_table(page):
    """Return the page with a new table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
