"""Items with different models."""

import torch
import torch.distributed as dist
from items_steps import sharded
from kit.scaled import set_scales, wrap
from kit_loops import WIDTH, Block, Loop, adam, blocks_of, data, ddp, item, net, seeded, sgd, update
from torch import nn
from torch.utils.checkpoint import checkpoint


def over(model, rank, **fields):
    optimizer = adam(model)
    protect = {"model": model, "optimizer": optimizer}
    return Loop(protect, update(model, optimizer, rank), blocks_of(model), optimizer, **fields)


class Noisy(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(x))))


@item("dropout")
def dropout(rank, _size):
    return over(ddp(seeded(lambda: nn.Sequential(Noisy(), Noisy(), Noisy()))), rank)


@item("BatchNorm")
def batch_norm(rank, _size):
    layers = seeded(
        lambda: nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block(), nn.BatchNorm1d(WIDTH, momentum=None))
    )
    return over(ddp(layers), rank)


class _Synchronized(torch.autograd.Function):
    """Normalizes with statistics of all ranks: an all_gather in forward, an all_reduce in backward, as in torch."""

    @staticmethod
    def forward(ctx, x, means):
        every = torch.empty(dist.get_world_size() * 2 * WIDTH)
        dist.all_gather_into_tensor(every, torch.cat([x.mean(0), x.pow(2).mean(0)]))
        mean, square = every.view(-1, 2, WIDTH).mean(0)
        scale = (square - mean.pow(2) + 1e-5).rsqrt()
        means.lerp_(mean, 0.1)
        ctx.save_for_backward(scale)
        return (x - mean) * scale

    @staticmethod
    def backward(ctx, grad):
        (scale,) = ctx.saved_tensors
        mean = grad.mean(0)
        dist.all_reduce(mean)
        return (grad - mean / dist.get_world_size()) * scale, None


class Synchronized(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("means", torch.zeros(WIDTH))

    def forward(self, x):
        return _Synchronized.apply(x, self.means)


@item("SyncBatchNorm (its collectives; torch's own refuses CPU tensors)")
def sync_batch_norm(rank, _size):
    model = seeded(lambda: nn.Sequential(Block(), Synchronized(), Block(), Synchronized(), Block()))
    return over(ddp(model, broadcast_buffers=False), rank)


@item("EMA of the weights")
def ema(rank, _size):
    model = ddp(seeded(lambda: nn.Sequential(*net(2), nn.BatchNorm1d(WIDTH))))
    average = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    loop = over(model, rank, between=lambda _index: average.update_parameters(model.module))
    loop.protect["average"] = average
    return loop


@item("tied weights")
def tied(rank, _size):
    def make():
        model = nn.Sequential(nn.Embedding(32, WIDTH), *net(2), nn.Linear(WIDTH, 32, bias=False))
        model[-1].weight = model[0].weight
        return model

    model = ddp(seeded(make))
    optimizer = adam(model)

    def step(index):
        generator = torch.Generator().manual_seed(1000 * index + rank)
        words = torch.randint(0, 32, (7,), generator=generator)
        nn.functional.cross_entropy(model(words), words.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("frozen parameters")
def frozen(rank, _size):
    model = net()
    model[0].requires_grad_(requires_grad=False)
    model[2].up.bias.requires_grad_(requires_grad=False)
    model = ddp(model)
    optimizer = adam(model)
    return Loop(
        {"model": model, "optimizer": optimizer}, update(model, optimizer, rank), [*blocks_of(model)[1:]], optimizer
    )


@item("frozen parameters, FSDP2")
def frozen_fsdp(rank, _size):
    model = net()
    model[0].requires_grad_(requires_grad=False)
    model = sharded(model)
    optimizer = adam(model)
    return Loop(
        {"model": model, "optimizer": optimizer}, update(model, optimizer, rank), [*blocks_of(model)[1:]], optimizer
    )


@item("uneven shards, FSDP2")
def uneven(rank, _size):
    """Rows that three ranks cannot share evenly, and one row that only one rank has."""

    def make():
        return nn.Sequential(Block(inner=7), Block(inner=1), Block(inner=32))

    model = sharded(seeded(make))
    optimizer = adam(model)
    return Loop({"model": model, "optimizer": optimizer}, update(model, optimizer, rank), blocks_of(model), optimizer)


def grown(model, parts, optimizer, rank, size, *, reduces):
    """Train the last block, and from step 4 on also the others, at another rate."""

    def step(index):
        if index == 4:
            added = [parameter for part in parts for parameter in part.parameters()]
            for parameter in added:
                parameter.requires_grad_(requires_grad=True)
            optimizer.add_param_group({"params": added, "lr": 0.003, "momentum": 0.5})
        model(data(index, rank)).pow(2).mean().backward()
        if reduces:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model)[-1:] * 2, optimizer)


@item("parameters of a class around a tensor, with a scale of each that follows the update (torchao's float8), FSDP2")
def scaled(rank, _size):
    model = sharded(wrap(net()))
    optimizer = adam(model)
    train = update(model, optimizer, rank)

    def step(index):
        train(index)
        set_scales(model)

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("parameters unfrozen and added to the optimizer during training")
def unfrozen(rank, size):
    model = net()
    model[:2].requires_grad_(requires_grad=False)
    return grown(model, [model[0], model[1]], sgd(model[2]), rank, size, reduces=True)


@item("parameters unfrozen and added to the optimizer during training, FSDP2")
def unfrozen_fsdp(rank, size):
    model = net()
    model[:2].requires_grad_(requires_grad=False)
    model = sharded(model)
    return grown(model, [model[0], model[1]], sgd(model[2]), rank, size, reduces=False)


@item("unused parameters (find_unused_parameters)")
def unused(rank, _size):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = net()
            self.calls = 0

        def forward(self, x, *, left):
            return self.blocks[0](self.blocks[1](x) if left else self.blocks[2](x))

    model = ddp(Either(), find_unused_parameters=True)
    optimizer = adam(model)

    def step(index):
        model(data(index, rank), left=index % 2 == rank % 2).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model)[:1] * 2, optimizer)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([Noisy(), Noisy(), Noisy()])
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@item("activation checkpointing")
def checkpointing(rank, _size):
    return over(ddp(seeded(lambda: Checkpointed(reentrant=False))), rank)


@item("activation checkpointing, FSDP2")
def checkpointing_fsdp(rank, _size):
    return over(sharded(seeded(lambda: Checkpointed(reentrant=False))), rank)


class Mark(nn.Module):
    """A module outside compiled code that deaths can hook. Without its parameter, the first mark would have no backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale


def compiled(wrap, rank):
    body = torch.compile(seeded(lambda: nn.Sequential(Noisy(), Noisy())))
    model = wrap(nn.Sequential(Mark(), body, Mark()))
    optimizer = sgd(model)
    marks = blocks_of(model, Mark)
    return Loop({"model": model, "optimizer": optimizer}, update(model, optimizer, rank), marks, optimizer)


@item("torch.compile, DDP")
def compiled_ddp(rank, _size):
    return compiled(lambda model: ddp(model, bucket_cap_mb=25), rank)  # with smaller buckets torch's DDPOptimizer fails


@item("torch.compile, FSDP2")
def compiled_fsdp(rank, _size):
    return compiled(sharded, rank)


@item("torch.compile, batches of other sizes after some steps, DDP")
def compiled_sizes(rank, _size):
    """The second size makes torch compile for any size. A replacement that has not met it goes on with code for the first size."""
    layers = seeded(lambda: nn.Sequential(Noisy(), nn.LayerNorm(WIDTH), nn.Softmax(0), Noisy()))
    model = ddp(nn.Sequential(Mark(), torch.compile(layers), Mark()), bucket_cap_mb=25)
    optimizer = sgd(model)

    def step(index):
        rows = 4 if index % 6 == 3 else 6
        model(data(index, rank)[:rows]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model, Mark), optimizer)
