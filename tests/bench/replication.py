"""The bandwidth of a snapshot's copy to a buddy over loopback, compared with plain loops of sendfile or sendall and recv_into.

    python tests/bench/replication.py [--quick] [--mib 1024] [--streams 1 2 4] [--ranks-per-parity 2 4]

First each snapshot has new content. Then a rank of the buddy has the same content, as in DDP, and only digests are sent. The
buddy's memory is warm, as from the third snapshot on in a job. The ends of the streams and of the loops are two processes, as in a
job, but they share this machine's cores.

Last, ranks of several nodes send to one buddy, which keeps a copy of each or one parity, and then each rank is lost once: the time
until its snapshot is in the slot of another node, and the memory that the buddy has for all of them. Here all nodes share one
process.
"""

import argparse
import asyncio
import mmap
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "vault")]

from vault_kit import Node, fill_slot

from deadpool_run.ids import Rank
from deadpool_run.vault.status_page import BUSY

RANK, OTHER = Rank(0), Rank(1)
PIECE_BYTES = 1 << 20
WARM_UP = 3
"""The number of snapshots until all memory is allocated."""


def with_sendfile(sock: socket.socket, fd: int, nbytes: int) -> None:
    sent = 0
    while sent < nbytes:
        sent += os.sendfile(sock.fileno(), fd, sent, nbytes - sent)


def with_sendall(sock: socket.socket, fd: int, nbytes: int) -> None:
    with mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        for at in range(0, nbytes, PIECE_BYTES):
            with view[at : at + PIECE_BYTES] as piece:
                sock.sendall(piece)


class FarEnd:
    """The buddy, and the receiving end of the loops, in another process."""

    def __init__(self, nbytes: int, streams: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_far_end, args=(theirs, nbytes, streams))
        self._process.start()
        self.peer, self.address = self._pipe.recv()

    def begin(self, *request: object) -> None:
        """Ask for something; `end` waits for it."""
        self._pipe.send(request)

    def end(self) -> float:
        """Return the CPU time of that process, after what was asked for."""
        return float(self._pipe.recv())

    def ask(self, *request: object) -> float:
        """Ask for something, and wait for it."""
        self.begin(*request)
        return self.end()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def run_far_end(pipe: Connection, nbytes: int, streams: int) -> None:
    asyncio.run(obey(pipe, nbytes, streams))


async def obey(pipe: Connection, nbytes: int, streams: int) -> None:
    node = Node("b", 2, streams=streams)
    node.replicator.keep({RANK})
    with socket.create_server(("127.0.0.1", 0)) as listener, mmap.mmap(-1, nbytes) as target:
        pipe.send((node.peer, listener.getsockname()))
        while (request := await asyncio.to_thread(pipe.recv)) is not None:
            match request:
                case ("receive",):
                    await asyncio.to_thread(receive, listener, target)
                case ("write", version):
                    write(node, OTHER, version, content(version, nbytes))
                    node.vault.status_page.rank_entries[OTHER].set_slot(version % 2, version)
            pipe.send(time.process_time())
    await node.close()


def receive(listener: socket.socket, target: mmap.mmap) -> None:
    """Receive in a plain loop."""
    into, _ = listener.accept()
    received = 0
    with into, memoryview(target) as view:
        while received < len(target):
            received += into.recv_into(view[received : received + PIECE_BYTES], 0, socket.MSG_WAITALL)


def bare(send: Callable[[socket.socket, int, int], None], fd: int, nbytes: int, far_end: FarEnd) -> tuple[float, float]:
    """Send and receive in a plain loop; return its rates."""
    stopwatch = Stopwatch(far_end)
    far_end.begin("receive")
    with socket.create_connection(far_end.address) as out:
        send(out, fd, nbytes)
        far_end.end()
    return stopwatch.rates(nbytes)


class Stopwatch:
    """The time, and the CPU time of both processes, from now on."""

    def __init__(self, far_end: FarEnd) -> None:
        self._far_end = far_end
        self._cpu_s = far_end.ask("tell") + time.process_time()
        self._began = time.perf_counter()

    def rates(self, nbytes: int) -> tuple[float, float]:
        """Return the bandwidth in GB/s, and the CPU seconds per GB."""
        wall_s = time.perf_counter() - self._began
        return rates(nbytes, wall_s, self._far_end.ask("tell") + time.process_time() - self._cpu_s)


def content(version: int, nbytes: int) -> bytes:
    return np.random.default_rng(version).bytes(nbytes)


def write(node: Node, rank: Rank, version: int, body: bytes) -> None:
    """Write a snapshot without an entry in the status page."""
    slot, rank_entry = version % 2, node.vault.status_page.rank_entries[rank]
    rank_entry.set_slot(slot, BUSY)
    fill_slot(node.vault.descriptors(rank)[f"slot{slot}"], rank, version, body)


async def measure(mib: int, repeats: int, streams: int, *, found: bool) -> None:
    nbytes = mib << 20
    a, far_end = Node("a", 2, streams=streams), FarEnd(nbytes, streams)
    a.replicator.set_buddies({RANK: (far_end.peer,)})
    results = []
    for version in range(repeats + WARM_UP):
        write(a, RANK, version, content(version, nbytes))
        if found:
            far_end.ask("write", version)
        fd = a.vault.descriptors(RANK)[f"slot{version % 2}"]
        bares = [bare(send, fd, nbytes, far_end) for send in (with_sendfile, with_sendall)]
        sent, stopwatch = a.replicator.traffic().sent_bytes, Stopwatch(far_end)
        a.vault.status_page.rank_entries[RANK].set_slot(version % 2, version)
        a.replicator.captured(RANK, version)
        await a.until(lambda version=version: version in a.told[RANK][0], limit_s=120)
        ours = stopwatch.rates(nbytes)
        sent = a.replicator.traffic().sent_bytes - sent
        assert found == (sent < nbytes // 2), f"{sent} bytes were sent"
        if version >= WARM_UP:
            results.append((ours, *bares))
    await a.close()
    far_end.close()
    medians = [[statistics.median(each[loop][at] for each in results) for at in (0, 1)] for loop in range(3)]
    (rate, cost), *loops = medians
    told = "; ".join(
        f"{name} loop {loop[0]:.2f} GB/s, {loop[1]:.2f} s per GB (ratio {rate / loop[0]:.2f})"
        for name, loop in zip(("sendfile", "sendall"), loops, strict=True)
    )
    what = "at the buddy" if found else "new content"
    print(
        f"{mib} MiB, {what}, streams: {streams}: {rate:.2f} GB/s, {cost:.2f} CPU s per GB, both ends together; {told}"
    )


async def measure_group(mib: int, repeats: int, count: int, *, parity: bool) -> None:
    nbytes, ranks = mib << 20, tuple(map(Rank, range(count)))
    groups = [ranks] if parity else []
    *owners, buddy, new = [Node(f"n{at}", count) for at in range(count + 2)]
    buddy.replicator.keep(ranks, groups)
    for rank, owner in zip(ranks, owners, strict=True):
        owner.complete_transcript(rank)
        owner.replicator.set_buddies({rank: (buddy.peer,)}, groups)
    results = []
    for version in range(repeats + WARM_UP):
        for rank, owner in zip(ranks, owners, strict=True):
            write(owner, rank, version, os.urandom(nbytes))
        began, cpu = time.perf_counter(), time.process_time()
        for rank, owner in zip(ranks, owners, strict=True):
            owner.vault.status_page.rank_entries[rank].set_slot(version % 2, version)
            owner.replicator.captured(rank, version)
        for rank, owner in zip(ranks, owners, strict=True):
            await owner.until(lambda rank=rank, owner=owner: version in owner.told[rank][0], limit_s=120)  # noqa: B023
        if version >= WARM_UP:
            results.append(rates(count * nbytes, time.perf_counter() - began, time.process_time() - cpu))
    rate, cost = (statistics.median(result[at] for result in results) for at in (0, 1))
    taken = buddy.vault.status_page.copies_taken / nbytes
    fetched = []
    for rank in ranks:
        assert await new.seat(rank, buddy.peer) is None
        began = time.perf_counter()
        assert await new.fetch(rank, version, buddy.peer) is None
        fetched.append(time.perf_counter() - began)
    for node in (*owners, buddy, new):
        await node.close()
    kept = f"one parity for {count} ranks" if parity else f"copies of {count} ranks"
    print(
        f"{mib} MiB, {kept}: {rate:.2f} GB/s, {cost:.2f} CPU s per GB; the buddy has {taken:.1f} snapshots' memory; "
        f"a lost rank's is there after {statistics.median(fetched):.2f} s"
    )


def rates(nbytes: int, wall_s: float, cpu_s: float) -> tuple[float, float]:
    """Return the bandwidth in GB/s, and the CPU seconds per GB."""
    return nbytes / wall_s / 1e9, cpu_s / nbytes * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="*", default=[1, 64, 512])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--ranks-per-parity", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller snapshots")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for mib in args.mib[:2] if args.quick else args.mib:
        for streams in args.streams:
            asyncio.run(measure(mib, 3 if args.quick else 7, streams, found=False))
        asyncio.run(measure(mib, 3 if args.quick else 7, 1, found=True))
    for mib in args.mib[1:2]:
        for count in args.ranks_per_parity:
            for parity in (False, True):
                asyncio.run(measure_group(mib, 3 if args.quick else 7, count, parity=parity))


if __name__ == "__main__":
    main()
