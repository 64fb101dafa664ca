"""The numbers from which docs/gpu.md computes the cost of an attach are those of torch's Gloo."""

import json
import subprocess
import sys

import attach_cost
import pytest

COUNTED = """
import json, os, sys, threading
from collections import Counter
from datetime import timedelta
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

class Counted(dist.Store):
    def __init__(self, inner, counts):
        super().__init__()
        self.inner, self.counts = inner, counts
    def set(self, key, value):
        self.counts["written"] += len(value)
        self.inner.set(key, value)
    def get(self, key):
        self.counts["reads"] += 1
        return self.inner.get(key)
    def wait(self, keys, *timeout):
        self.inner.wait(keys, *timeout)
    def has_extended_api(self):
        return True
    def multi_get(self, keys):
        self.counts["reads"] += len(keys)
        return self.inner.multi_get(keys)

def connect(rank, size):
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads, options._timeout = 1, timedelta(seconds=60)
    alive.append(ProcessGroupGloo(Counted(store, counts[rank]), rank, size, options))

def sockets():
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    return sum(link.startswith("socket:") for link in links)

size = int(sys.argv[1])
store, counts, alive, before = dist.HashStore(), [Counter() for _ in range(size)], [], sockets()
threads = [threading.Thread(target=connect, args=(rank, size)) for rank in range(size)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps({"counts": counts, "sockets": (sockets() - before) / size}), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("size", [2, 5])
def test_gloo_reads_and_opens_what_the_table_says(size):
    done = subprocess.run([sys.executable, "-c", COUNTED, str(size)], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert {each["reads"] for each in told["counts"]} == {size}
    assert {each["written"] for each in told["counts"]} == {attach_cost.address_bytes(size)}
    listener = 1
    assert told["sockets"] == size - 1 + listener


def test_the_page_has_the_table():
    page = attach_cost.PAGE.read_text(encoding="utf-8")
    assert page == attach_cost.with_table(page)
