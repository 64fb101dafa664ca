"""The cost of deadpool groups: microseconds per collective, compared with plain Gloo in turns in the same processes.

    python tests/bench/collectives.py [--size 2] [--count 2000]

`issue` is the time until the call returns its work, `wait` the time from then until the outputs. Both are medians of rank 0.
"""

import argparse
import multiprocessing
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.worker.groups.backend import install
from deadpool_run.worker.groups.registry import Registry

BLOCK = 100
TURNS = 3
TIMEOUT = timedelta(seconds=60)


class Waited:
    """A work that has completed already."""

    def wait(self):
        return True


def cases(rank, size):
    """Return the measured functions by name. Each returns the work to wait for."""
    small, large = torch.ones(1), torch.ones(1 << 16)
    out = torch.empty(size * 1024)
    part, parts = torch.ones(1024), torch.ones(size * 1024)
    several = [torch.ones(256) for _ in range(8)]
    successor, predecessor = (rank + 1) % size, (rank - 1) % size
    waited = Waited()

    def exchange():
        send = dist.isend(part, successor)
        dist.recv(out[:1024], predecessor)
        return send

    def batch():
        ops = [dist.P2POp(dist.isend, part, successor), dist.P2POp(dist.irecv, out[:1024], predecessor)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return waited

    def objects():
        dist.broadcast_object_list([rank, "some object"], src=0)
        return waited

    def functional():
        funcol.wait_tensor(funcol.all_reduce(part, "sum", dist.group.WORLD))
        return waited

    return {
        "all_reduce 4 B": lambda: dist.all_reduce(small, async_op=True),
        "all_reduce 256 KiB": lambda: dist.all_reduce(large, async_op=True),
        "all_reduce_coalesced 8 x 1 KiB": lambda: dist.all_reduce_coalesced(several, async_op=True),
        "broadcast 4 KiB": lambda: dist.broadcast(part, 0, async_op=True),
        "reduce 4 KiB": lambda: dist.reduce(part, 0, async_op=True),
        "all_gather_into_tensor 4 KiB": lambda: dist.all_gather_into_tensor(out, part, async_op=True),
        "reduce_scatter_tensor 4 KiB": lambda: dist.reduce_scatter_tensor(part, parts, async_op=True),
        "all_to_all_single 4 KiB": lambda: dist.all_to_all_single(out, parts, async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
        "send and receive 4 KiB": exchange,
        "batch_isend_irecv 4 KiB": batch,
        "broadcast_object_list": objects,
        "functional all_reduce 4 KiB": functional,
    }


def measure(function, count):
    """Return the median times of issue and wait, in seconds."""
    issued, waited = [], []
    for _ in range(count):
        start = time.perf_counter_ns()
        work = function()
        middle = time.perf_counter_ns()
        work.wait()
        waited.append(time.perf_counter_ns() - middle)
        issued.append(middle - start)
    return statistics.median(issued), statistics.median(waited)


def main_of_rank(rank, size, port, count, pipe):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    status_page = StatusPage(create_status_page(size), size)
    install(
        Registry(rank_entry=status_page.rank_entries[rank], on_failure=print),
        store=store.clone(),
        prefix="e1",
        attached=True,
    )
    results = {}
    for turn in range(TURNS):
        for backend in ("gloo", "deadpool"):
            prefixed = dist.PrefixStore(f"{backend}{turn}", store)
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=TIMEOUT)
            for name, function in cases(rank, size).items():
                measure(function, BLOCK)
                results.setdefault(name, {}).setdefault(backend, []).append(measure(function, count))
            dist.barrier()
            dist.destroy_process_group()
    pipe.send(results)
    pipe.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(options.size)]
    processes = [
        context.Process(target=main_of_rank, args=(rank, options.size, store.port, options.count, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    results, *_ = [mine.recv() for mine, _ in pipes]
    for process in processes:
        process.join()
    print(f"{'':30}{'gloo':>18}{'deadpool':>18}{'more':>10}{'ratio':>8}   (us: issue + wait)")
    for name, of in results.items():
        (gi, gw), (di, dw) = (min(of[backend], key=sum) for backend in ("gloo", "deadpool"))
        times = "".join(f"{i / 1e3:>9.1f} +{w / 1e3:>7.1f}" for i, w in ((gi, gw), (di, dw)))
        print(f"{name:30}{times}{(di + dw - gi - gw) / 1e3:>10.1f}{(di + dw) / (gi + gw):>8.2f}")


if __name__ == "__main__":
    main()
