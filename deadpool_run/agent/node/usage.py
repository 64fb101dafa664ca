"""Samples of the CPU time, memory and GPU that each rank of this node uses, for viewers. The workers are not asked."""

import asyncio
import time
from collections.abc import Callable, Iterator

import psutil

from deadpool_run.agent.node.gpus import GpuUse
from deadpool_run.ids import Rank
from deadpool_run.vault.status_page import EMPTY, StatusPage

EVERY_S = 2.0
_COST = 0.002
"""Samples take at most this part of a core."""
_MILLIS_PER_S = 1e3
_NO_GPU = GpuUse(None, None)


class UsageSampler:
    """Writes the use of each rank to the status page, every two seconds. Begins in the running loop."""

    def __init__(
        self,
        processes: Callable[[], Iterator[tuple[Rank, int, int]]],
        page: Callable[[], StatusPage],
        gpu: Callable[[int], GpuUse | None],
    ) -> None:
        """Take the first sample soon.

        `processes` yields rank, local rank and process of each worker. `page` returns the present status page, as each start of
        the world creates one. `gpu` returns the use of a local rank's GPU, if it is known.
        """
        self._processes, self._page, self._gpu = processes, page, gpu
        self._before: dict[int, tuple[float, float]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(EVERY_S, self._again)

    def close(self) -> None:
        """Stop."""
        self._timer.cancel()

    def _again(self) -> None:
        before_s = time.thread_time()
        self.sample(self._loop.time())
        cost_s = time.thread_time() - before_s
        self._timer = self._loop.call_later(max(EVERY_S, cost_s / _COST), self._again)

    def sample(self, now: float) -> None:
        """Write what each rank uses. The CPU's use is that since the last sample of its process."""
        page, seen = self._page(), dict[int, tuple[float, float]]()
        for rank, local_rank, pid in self._processes():
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times, resident = process.cpu_times(), process.memory_info().rss
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended; /proc hides it
                continue
            cpu_s = times.user + times.system
            entry, gpu = page.rank_entries[rank], self._gpu(local_rank) or _NO_GPU
            seen[pid] = now, cpu_s
            if before := self._before.get(pid):
                since, cpu_s_before = before
                entry.cpu_millis = round(_MILLIS_PER_S * (cpu_s - cpu_s_before) / (now - since))
            entry.memory = resident
            entry.gpu_percent = EMPTY if gpu.percent is None else gpu.percent
            entry.gpu_memory = EMPTY if gpu.memory is None else gpu.memory
        self._before = seen
