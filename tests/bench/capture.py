"""The cost of a snapshot: the bandwidth of a capture, and the time of the main thread that it takes, in microseconds.

    python tests/bench/capture.py [MEBIBYTES]

Prints one line for each measurement. `begin` and `wait` are the times in a step whose capture ends before the next
optimizer step: that is the usual case. On a shared machine numbers are only hints, so run it alone.
"""

import statistics
import sys
import time

import torch
from torch import nn

from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import create_memory
from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.worker.snapshot.snapshot import Snapshots

ROUNDS = 200
LAYERS = 100  # each with a weight and a bias: 200 parameters, 800 tensors with AdamW's state


def snapshots_of(model, optimizer, *extra):
    status_page = StatusPage(create_status_page(1), 1)
    made = Snapshots(
        slot_fds=(create_memory("bench0"), create_memory("bench1")),
        status_page=status_page,
        rank=Rank(0),
        on_skip=lambda version, _: print(f"skipped {version}"),
    )
    made.protect("model", model)
    made.protect("optimizer", optimizer)
    for number, obj in enumerate(extra):
        made.protect(f"extra{number}", obj)
    return made, status_page


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def bandwidth(mebibytes):
    """Capture a large model several times. The bandwidth is the snapshot's bytes per time of the copy thread."""
    width = int((mebibytes * 2**20 / 4 / 3 / 4) ** 0.5)  # 4 layers, each with 3 tensors under AdamW
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    made, status_page = snapshots_of(model, trained(model))
    rates = []
    for version in range(12):
        made.capture_now(Version(version))
        rates.append(3 * 4 * width * width * 4 / status_page.rank_entries[0].capture_ns)
    made.close()
    # The first two captures allocate the slots.
    print(f"capture     {statistics.median(rates[2:]):6.2f} GB/s of {mebibytes} MiB (first: {rates[0]:.2f} GB/s)")


def main_thread(label, model, *, schedule=False):
    """Measure the time of begin() and wait() in the main thread."""
    optimizer = trained(model)
    extra = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)] if schedule else []
    made, status_page = snapshots_of(model, optimizer, *extra)
    begins, waits, captures = [], [], []
    for version in range(ROUNDS):
        start = time.perf_counter_ns()
        made.begin(Version(version))
        begins.append(time.perf_counter_ns() - start)
        while status_page.rank_entries[0].slots[version % 2] != version:  # in place of forward and backward
            time.sleep(0)
        captures.append(status_page.rank_entries[0].capture_ns)
        start = time.perf_counter_ns()
        made.wait()
        waits.append(time.perf_counter_ns() - start)
    made.close()
    begin, wait, capture = (statistics.median(times[10:]) / 1000 for times in (begins, waits, captures))
    print(f"{label:40} begin {begin:7.0f} us   wait {wait:5.1f} us   capture (parallel) {capture:7.0f} us")


def layers(width, *, norm):
    for _ in range(LAYERS):
        yield nn.Linear(width, width)
        if norm:
            yield nn.BatchNorm1d(width, affine=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main_thread("200 parameters, AdamW", nn.Sequential(*layers(64, norm=False)))
    main_thread("200 parameters, 300 buffers, scheduler", nn.Sequential(*layers(64, norm=True)), schedule=True)
    bandwidth(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
