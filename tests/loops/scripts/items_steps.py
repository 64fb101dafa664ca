"""Items with different steps, and different actions between steps."""

import torch
import torch.distributed as dist
from kit_loops import BATCH, WIDTH, Loop, adam, blocks_of, data, ddp, item, net, seeded, sgd, update
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@item("DDP")
def plain_ddp(rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    return Loop({"model": model, "optimizer": optimizer}, update(model, optimizer, rank), blocks_of(model), optimizer)


@item("FSDP2")
def plain_fsdp(rank, _size):
    model = sharded(net())
    optimizer = adam(model)
    return Loop({"model": model, "optimizer": optimizer}, update(model, optimizer, rank), blocks_of(model), optimizer)


@item("two optimizers in one step (GAN)")
def gan(rank, _size):
    maker, judge = (
        ddp(net(2)),
        ddp(seeded(lambda: nn.Sequential(*net(2), nn.Linear(WIDTH, 1))), broadcast_buffers=False),
    )
    makes, judges = adam(maker), adam(judge)

    def step(index):
        noise = torch.randn(BATCH, WIDTH)
        judges.zero_grad()
        (judge(maker(noise).detach()).mean() - judge(data(index, rank)).mean()).backward()
        judges.step()
        makes.zero_grad()
        for parameter in judge.parameters():
            parameter.requires_grad_(requires_grad=False)
        (-judge.module(maker(noise)).mean()).backward()
        for parameter in judge.parameters():
            parameter.requires_grad_(requires_grad=True)
        makes.step()

    protect = {"maker": maker, "judge": judge, "makes": makes, "judges": judges}
    return Loop(protect, step, [*blocks_of(judge), *blocks_of(maker)], makes)


@item("the maker's loss adds to the judge's gradients of the step before (GAN)")
def gan_that_zeroes_late(rank, _size):
    maker, judge = ddp(net(2)), ddp(nn.Sequential(*net(2), nn.Linear(WIDTH, 1)))
    makes, judges = adam(maker), adam(judge)

    def step(index):
        made = maker(torch.randn(BATCH, WIDTH))
        makes.zero_grad()
        (-judge(made).mean()).backward()
        makes.step()
        judges.zero_grad()
        (judge(made.detach()).mean() - judge(data(index, rank)).mean()).backward()
        judges.step()

    protect = {"maker": maker, "judge": judge, "makes": makes, "judges": judges}
    return Loop(protect, step, [*blocks_of(judge), *blocks_of(maker)], makes)


@item("gradient accumulation within a step, no_sync")
def accumulation(rank, _size):
    model = ddp(net())
    optimizer = adam(model)

    def step(index):
        for part in range(2):
            with model.no_sync():
                model(data(3 * index + part, rank)).pow(2).mean().backward()
        model(data(3 * index + 2, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("gradient accumulation over steps, no_sync")
def accumulation_over_steps(rank, _size):
    model = ddp(net())
    optimizer = adam(model)

    def step(index):
        if index % 3 < 2:
            with model.no_sync():
                model(data(index, rank)).pow(2).mean().backward()
            return
        model(data(index, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer, grads=True)


@item("gradient accumulation over steps, FSDP2")
def accumulation_over_steps_fsdp(rank, _size):
    model = sharded(net())
    optimizer = sgd(model)

    def step(index):
        model(data(index, rank)).pow(2).mean().backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer, grads=True)


@item("gradient accumulation without a reduction, FSDP2")
def accumulation_unsharded(rank, _size):
    model = sharded(net())
    optimizer = adam(model)

    def step(index):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            model(data(2 * index + part, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("gradient clipping, local norm")
def clipping(rank, _size):
    model = ddp(net())
    optimizer = sgd(model)

    def clip(_index):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)

    return Loop(
        {"model": model, "optimizer": optimizer},
        update(model, optimizer, rank, before=clip),
        blocks_of(model),
        optimizer,
    )


@item("gradient clipping, DTensor norm")
def clipping_dtensor(rank, _size):
    model = sharded(net())
    optimizer = sgd(model)

    def clip(_index):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm.full_tensor().item() >= 0

    return Loop(
        {"model": model, "optimizer": optimizer},
        update(model, optimizer, rank, before=clip),
        blocks_of(model),
        optimizer,
    )


def scaled(rank, *, unscale):
    model = ddp(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(index):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data(index, rank)).pow(2).mean()
        if index % 7 == 3:
            loss = loss * float("inf")  # a step that the scaler skips
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    protect = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Loop(protect, step, blocks_of(model), optimizer)


@item("GradScaler and autocast")
def grad_scaler(rank, _size):
    return scaled(rank, unscale=False)


@item("GradScaler with unscale_ and clipping")
def grad_scaler_clipping(rank, _size):
    return scaled(rank, unscale=True)


@item("collectives of the script between steps")
def metric(rank, size):
    model = ddp(net())
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def between(index):
        with torch.no_grad():
            value = model.module(data(index, rank)).pow(2).mean()
        dist.all_reduce(value)
        every = [torch.zeros(()) for _ in range(size)]
        dist.all_gather(every, value * rank)
        scheduler.step(float(value + sum(every)))

    protect = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Loop(protect, update(model, optimizer, rank), blocks_of(model), optimizer, between)


def evaluated(model, rank, *, every):
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def between(index):
        if index % every == every - 1:
            model.eval()
            total = torch.zeros(())
            for number in range(3):
                with torch.no_grad():
                    total += model(data(1000 + number, rank)).pow(2).mean()
            dist.all_reduce(total)
            scheduler.step(total.item())
            model.train()

    protect = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Loop(protect, update(model, optimizer, rank), blocks_of(model), optimizer, between)


@item("evaluation every N steps, DDP")
def evaluation(rank, _size):
    return evaluated(ddp(seeded(lambda: nn.Sequential(*net(2), nn.BatchNorm1d(WIDTH), *net(1)))), rank, every=2)


@item("evaluation every N steps, FSDP2")
def evaluation_fsdp(rank, _size):
    return evaluated(sharded(net()), rank, every=2)


@item("broadcast_object_list and all_gather_object in set-up")
def objects(rank, size):
    told = [{"width": WIDTH, "names": ["a", "b"]} if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    every = [None] * size
    dist.all_gather_object(every, {"rank": rank, "rate": 0.01 * (rank + 1)})
    model = ddp(net(len(every), width=told[0]["width"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=sum(each["rate"] for each in every))
    return Loop({"model": model, "optimizer": optimizer}, update(model, optimizer, rank), blocks_of(model), optimizer)


class Heads(nn.Module):
    """Gradients become ready in another order than the parameters were made, so DDP changes its first buckets."""

    def __init__(self):
        super().__init__()
        self.policy, self.value, self.body = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1), net()

    def forward(self, x):
        hidden = self.body(x)
        return self.policy(hidden).pow(2).mean() + self.value(hidden).pow(3).mean()


@item("several updates in each step (PPO), after three steps without any")
def epochs_in_a_step(rank, _size):
    model = ddp(seeded(Heads))
    optimizer = adam(model)
    gathered = []

    def step(index):
        gathered.append(data(index, rank))
        if index < 3:
            return
        for epoch in range(3):
            model(gathered[epoch % len(gathered)]).backward()
            optimizer.step()
            optimizer.zero_grad()
        del gathered[:-3]

    return Loop({"model": model, "optimizer": optimizer}, step, list(model.module.body), optimizer)
