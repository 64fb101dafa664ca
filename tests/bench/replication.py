"""How fast one snapshot goes to a buddy over loopback, beside a bare loop of sendfile and recv_into in the same run.

    python tests/bench/replication.py [--quick] [--mib 1024] [--streams 1 2 4]

The buddy's memory is warm, as it is from the third snapshot on. Both ends, of all streams, and both loops share this
machine's cores and one interpreter; in a job the ends are processes of their own, on machines of their own.
"""

import argparse
import asyncio
import functools
import mmap
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "vault")]

from vault_kit import Node, fill_slot

from deadpool_run.ids import Rank
from deadpool_run.vault.status_page import BUSY
from deadpool_run.vault.transfer.framing import PIECE_BYTES

RANK = Rank(0)


def bare(fd: int, nbytes: int, target: mmap.mmap) -> None:
    """Send and receive, and do nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        out = socket.create_connection(listener.getsockname())
        into, _ = listener.accept()

    def send() -> None:
        sent = 0
        while sent < nbytes:
            sent += os.sendfile(out.fileno(), fd, sent, nbytes - sent)

    thread = threading.Thread(target=send)
    thread.start()
    received = 0
    with memoryview(target) as view:
        while received < nbytes:
            received += into.recv_into(view[received : received + PIECE_BYTES], 0, socket.MSG_WAITALL)
    thread.join()
    out.close()
    into.close()


def write(node: Node, version: int, body: bytes) -> None:
    """Write a snapshot that its rank entry does not show yet."""
    slot, rank_entry = version % 2, node.vault.status_page.rank_entries[RANK]
    rank_entry.set_slot(slot, BUSY)
    fill_slot(node.vault.descriptors(RANK)[f"slot{slot}"], RANK, version, body)


async def measure(mib: int, repeats: int, streams: int) -> None:
    a, b = Node("a", 1, streams=streams), Node("b", 1, streams=streams)
    b.replicator.keep({RANK})
    body = os.urandom(1 << 20) * mib
    a.replicator.set_buddies({RANK: (b.peer,)})
    nbytes = mib << 20
    target = mmap.mmap(-1, nbytes)
    results = []
    for version in range(repeats + 3):
        write(a, version, body)
        slot = a.vault.descriptors(RANK)[f"slot{version % 2}"]
        theirs = timed(nbytes, functools.partial(bare, slot, nbytes, target))
        began, cpu = time.perf_counter(), time.process_time()
        a.vault.status_page.rank_entries[RANK].set_slot(version % 2, version)
        a.replicator.captured(RANK, version)
        await a.until(lambda version=version: version in a.told[RANK][0], limit_s=120)
        ours = rates(nbytes, time.perf_counter() - began, time.process_time() - cpu)
        if version >= 3:  # before that, one of the memories is new
            results.append((ours, theirs))
            print(f"  {mib} MiB, streams: {streams}: {ours[0]:.2f} GB/s; bare loop: {theirs[0]:.2f} GB/s")
    target.close()
    for node in (a, b):
        await node.close()
    rate, cost = (statistics.median(ours[at] for ours, _ in results) for at in (0, 1))
    bare_rate, bare_cost = (statistics.median(theirs[at] for _, theirs in results) for at in (0, 1))
    print(
        f"{mib} MiB, streams: {streams}: median {rate:.2f} GB/s, {cost:.2f} s of CPU a GB at both ends together; "
        f"bare loop: {bare_rate:.2f} GB/s, {bare_cost:.2f} s a GB"
    )


def timed(nbytes: int, act: Callable[[], None]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return rates(nbytes, time.perf_counter() - began, time.process_time() - cpu)


def rates(nbytes: int, wall_s: float, cpu_s: float) -> tuple[float, float]:
    """Return GB/s, and seconds of CPU a GB."""
    return nbytes / wall_s / 1e9, cpu_s / nbytes * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="*", default=[1, 64, 512])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller snapshots")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for mib in args.mib[:2] if args.quick else args.mib:
        for streams in args.streams:
            asyncio.run(measure(mib, 3 if args.quick else 7, streams))


if __name__ == "__main__":
    main()
