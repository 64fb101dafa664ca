"""Tiny deterministic trainings, one per way to lay a model out over four ranks. Each `build_*` returns a `Training`."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32
BATCH = 16
MICROBATCHES = 4


@dataclass
class Training:
    """A model under its wrappers and how to run one step of it. `blocks` are the modules that faults can hook."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    blocks: list[nn.Module]
    step: Callable[[int], None]
    between: Callable[[], None] = lambda: None
    scheduler: Any = None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class NoisyBlock(nn.Module):
    """Has what a forward pass changes besides activations: running statistics and the random number generators."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


def stack(kind=Block):
    torch.manual_seed(1234)
    return nn.Sequential(*(kind() for _ in range(4)))


def batch(index, replica):
    """Return the inputs of a data-parallel replica for a step: a function of both alone."""
    generator = torch.Generator().manual_seed(1000 * index + replica)
    return torch.randn(BATCH, WIDTH, generator=generator)


def simple_step(model, optimizer, replica):
    def step(index):
        model(batch(index, replica)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_ddp(ballast_mb):
    inner = stack()
    if ballast_mb:
        # Weight that is protected but costs no arithmetic: it makes a capture last.
        inner.ballast = nn.Parameter(torch.zeros(ballast_mb << 18), requires_grad=False)
    model = DistributedDataParallel(inner, bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    return Training(model, optimizer, blocks, simple_step(model, optimizer, dist.get_rank()))


def build_ddp_side(_ballast_mb):
    """Updates on a stream of its own, which only the next step waits for. Without a device: at once."""
    from deadpool_run.worker.device import choose  # noqa: PLC0415 - other scripts load checkpoints with torch alone

    model = DistributedDataParallel(stack(), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, device, side = dist.get_rank(), choose.device_backend(), []

    def step(index):
        is_ahead = device is not None and device.is_ahead
        if is_ahead and not side:
            side.append(device.stream("side"))
        for stream in side:
            device.join([stream])
        model(batch(index, rank)).pow(2).mean().backward()
        with device.on(side[0]) if side else nullcontext():
            optimizer.step()
            optimizer.zero_grad()

    return Training(model, optimizer, list(model.module), step)


def build_ddp_compiled(_ballast_mb):
    """Compiled from without: the reducer's collectives are issued beneath compiled code."""
    model = DistributedDataParallel(stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Training(
        model, optimizer, [], simple_step(torch.compile(model, backend="aot_eager"), optimizer, dist.get_rank())
    )


def build_ddp_full(_ballast_mb):
    """DDP with all that a step can change: buffers, three generators, a scheduler, clipping, accumulation."""
    model = DistributedDataParallel(stack(NoisyBlock), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - the global generator is what is to be protected

    def step(index):
        with model.no_sync():
            model(batch(index, rank) + random.gauss(0, 0.1)).pow(2).mean().backward()
        noise = float(np.random.normal(0, 0.1))  # noqa: NPY002
        model(batch(index + 5000, rank) + noise).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    blocks = [module for module in model.modules() if isinstance(module, NoisyBlock)]
    return Training(model, optimizer, blocks, step, scheduler=scheduler)


def build_ddp_scaled(_ballast_mb):
    """DDP whose scaler skips the update if a gradient is not finite."""
    model = DistributedDataParallel(stack(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    rank = dist.get_rank()

    def step(index):
        scaler.scale(model(batch(index, rank)).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Training(model, optimizer, list(model.module), step, scheduler=scaler)


def sharded(mesh):
    model = stack()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, optimizer, list(model), simple_step(model, optimizer, dist.get_rank()))


def build_fsdp(_ballast_mb):
    return sharded(init_device_mesh("cpu", (dist.get_world_size(),)))


def build_hsdp(_ballast_mb):
    return sharded(init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")))


def build_tp(_ballast_mb):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = stack()
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, optimizer, list(model), simple_step(model, optimizer, mesh.get_local_rank("dp")))


def build_pp(_ballast_mb):
    """Two pipeline stages (1F1B), each twice; the stages learn each other's shapes at their first step."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "pp"))
    stages, stage_index, replica = mesh.size(1), mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    per_stage = 4 // stages
    model = nn.Sequential(*list(stack())[stage_index * per_stage : (stage_index + 1) * per_stage])
    replicas = mesh.get_group("dp")
    stage = PipelineStage(model, stage_index, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda output, target: (output - target).pow(2).mean())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(index):
        if stage_index == 0:
            schedule.step(batch(index, replica))
        elif stage_index == stages - 1:
            schedule.step(target=batch(index + 5000, replica))
        else:
            schedule.step()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=replicas)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, list(model), step)


def build_plain(_ballast_mb):
    """No wrapper at all: the script's own all-reduces, one of them between the steps (an evaluation)."""
    model = stack()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rank = dist.get_rank()

    def step(index):
        model(batch(index, rank)).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()

    def between():
        with torch.no_grad():
            dist.all_reduce(model(batch(0, rank)).pow(2).mean())

    return Training(model, optimizer, list(model), step, between)


LAYOUTS = {
    "ddp": build_ddp,
    "ddp-full": build_ddp_full,
    "ddp-side": build_ddp_side,
    "ddp-compiled": build_ddp_compiled,
    "ddp-scaled": build_ddp_scaled,
    "fsdp": build_fsdp,
    "hsdp": build_hsdp,
    "tp": build_tp,
    "pp": build_pp,
    "plain": build_plain,
}
