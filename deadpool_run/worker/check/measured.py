"""The training that `deadpool-run doctor --gpu` measures: DDP or FSDP2, on GPUs where there are any.

`python -m deadpool_run.worker.check.measured LAYOUT FOLDER FATAL_STEP`, under a launcher. The last rank kills itself once, in the fatal
step; -1 is none. Each rank writes what it measured to the folder.
"""

import hashlib
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import deadpool_run
from deadpool_run.worker.compat.modules import local
from deadpool_run.worker.device.choose import device_backend

STEPS, WARM_STEPS = 40, 10
_WIDTH, _LAYERS, _BATCH = 512, 6, 32


class _Clock:
    """When each step began. With slots, it is no variable that snapshots keep."""

    __slots__ = ("began",)

    def __init__(self) -> None:
        self.began: dict[int, float] = {}

    def step_ms(self) -> float:
        """Return the median of the steps after the first ones, in ms."""
        steps = [
            self.began[index + 1] - self.began[index]
            for index in self.began
            if index >= WARM_STEPS and index + 1 in self.began
        ]
        return 1e3 * statistics.median(steps)


def main(layout: str, folder: Path, fatal_step: int) -> None:
    """Train, and write what was measured."""
    job = deadpool_run.init()
    model = _model(layout, job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.protect(model=model, optimizer=optimizer)
    clock = _Clock()
    for step in job.steps(STEPS):
        with step:
            clock.began[step.index] = time.perf_counter()
            torch.manual_seed(1000 * step.index + job.rank)
            loss = model(torch.randn(_BATCH, _WIDTH, device=job.device)).square().mean()
            loss.backward()
            if step.index == fatal_step and job.rank == job.world_size - 1:
                _die_once(folder / "killed")
            optimizer.step()
            optimizer.zero_grad()
    told = {
        "step_ms": clock.step_ms(),
        "digest": _digest(model),
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "CPU",
        "peak_bytes": torch.cuda.max_memory_allocated(job.device) if job.device.type == "cuda" else 0,
        "library": _library(job),
    }
    (folder / f"rank-{job.rank}.json").write_text(json.dumps(told), encoding="utf-8")


def _model(layout: str, job: deadpool_run.Job) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers).to(job.device)
    if layout == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(job.device.type, (job.world_size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _die_once(flag: Path) -> None:
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(local(parameter.detach()).cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def _library(job: deadpool_run.Job) -> str:
    device = device_backend() if job.protected else None
    return "gloo" if device is None else device.name


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
