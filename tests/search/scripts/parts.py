"""Parts of composed loops: optimizers, schedulers, blocks, data, averages, and a distributed model."""

import contextlib

import torch
import torch.distributed as dist
from kit_loops import BATCH, Block, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.003, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}
SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.7),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100, cycle_momentum=False),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        [4],
    ),
}


class Noisy(Block):
    def forward(self, x):
        return x + self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.3, training=self.training))


class Normed(Block):
    def __init__(self, width):
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return super().forward(self.norm(x))


class Checkpointed(Noisy):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Adapted(Block):
    """A frozen block with a small trained path in parallel."""

    def __init__(self, width):
        super().__init__(width)
        self.requires_grad_(requires_grad=False)
        self.narrow, self.wide = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return super().forward(x) + self.wide(self.narrow(x))


class Scaled(nn.Module):
    """Multiplies by a tensor attribute that is not a buffer."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.level = torch.ones(width)

    def forward(self, x):
        if self.training:
            self.level = 0.9 * self.level + 0.1 * x.detach().abs().mean(0)
        return x * self.gain * self.level


BLOCKS = {"plain": Block, "dropout": Noisy, "norm": Normed, "checkpointed": Checkpointed}


class Counts(nn.Module):
    """A metric: each step changes its buffers, and nothing reads them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def update(self, value):
        self.total += value.detach()
        self.count += 1


class Reader:
    """A data loader of the script that knows its position."""

    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(rank)
        self.read = 0

    def next(self, width):
        self.read += 1
        return torch.randn(BATCH, width, generator=self.generator) + 0.01 * self.read

    def state_dict(self):
        return {"generator": self.generator.get_state(), "read": self.read}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.read = state["read"]


class Shadow:
    """A running average of parameters: of this rank's shard of each."""

    def __init__(self, parameters):
        self.of = list(parameters)
        self.averages = [local(parameter).clone() for parameter in self.of]

    @torch.no_grad()
    def update(self):
        for average, parameter in zip(self.averages, self.of, strict=True):
            average.lerp_(local(parameter), 0.1)

    def state_dict(self):
        return {"averages": self.averages}

    def load_state_dict(self, state):
        for average, value in zip(self.averages, state["averages"], strict=True):
            average.copy_(value)


def local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def keyed(index, part, replica, width):
    generator = torch.Generator().manual_seed(100_000 * part + 1000 * index + replica)
    return torch.randn(BATCH, width, generator=generator)


# --- the distributed model ---------------------------------------------------------------------------------------------


class Spread:
    """The model, distributed over the ranks in one of the ways."""

    def __init__(self, spec, rank, size):
        self.spec, self.rank, self.size = spec, rank, size
        self.kind = spec["wrap"]
        self.replica = rank
        self.schedule = None
        self.bare = seeded(self._make)
        self.model = getattr(self, f"_{self.kind}")()

    def _make(self):
        spec, width = self.spec, self.spec["width"]
        kinds = [Adapted if spec["trains"] == "adapters" else BLOCKS[each] for each in spec["blocks"]]
        model = nn.Sequential(*(kind(width) for kind in kinds))
        if spec["trains"] == "frozen":
            model[0].requires_grad_(requires_grad=False)
        if spec.get("breach") == "attribute":
            model.append(Scaled(width))
        return model

    def _ddp(self):
        options = {"bucket_cap_mb": self.spec["bucket_cap_mb"], **self.spec["ddp"]}
        return DistributedDataParallel(self.bare, **options)

    def _plain(self):
        return self.bare

    def _sharded(self, mesh):
        for block in self.bare:
            fully_shard(block, mesh=mesh)
        return fully_shard(self.bare, mesh=mesh)

    def _fsdp(self):
        return self._sharded(init_device_mesh("cpu", (self.size,)))

    def _hsdp(self):
        shards = 2 if self.size == 4 else 1
        return self._sharded(
            init_device_mesh("cpu", (self.size // shards, shards), mesh_dim_names=("replicate", "shard"))
        )

    def _tp(self):
        mesh = init_device_mesh("cpu", (self.size // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in self.bare:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.replica = mesh.get_local_rank("dp")
        return self._sharded(mesh["dp"])

    def _pp(self):
        stages = 2 if self.size == 4 else self.size
        mesh = init_device_mesh("cpu", (self.size // stages, stages), mesh_dim_names=("dp", "pp"))
        self.stage, self.stages = mesh.get_local_rank("pp"), stages
        self.replica, self.replicas = mesh.get_local_rank("dp"), mesh.get_group("dp")
        torch.manual_seed(1234 + self.stage)
        model = nn.Sequential(*(Block(self.spec["width"]) for _ in range(2)))
        stage = PipelineStage(model, self.stage, stages, torch.device("cpu"), group=mesh.get_group("pp"))
        self.schedule = Schedule1F1B(stage, stages, loss_fn=lambda output, target: (output - target).pow(2).mean())
        return model

    def unsynchronized(self, *, last):
        """Return a context for a microbatch without reduction of gradients, unless it is the last one."""
        if last or self.kind != "ddp" or not self.spec["no_sync"]:
            return contextlib.nullcontext()
        return self.model.no_sync()

    def reduce(self):
        """Reduce the gradients where no wrapper does."""
        if self.kind in ("plain", "pp"):
            group = self.replicas if self.kind == "pp" else None
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= dist.get_world_size(group)
