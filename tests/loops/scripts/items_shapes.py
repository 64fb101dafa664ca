"""Items with objects that do not train, or that train in an unusual way. They must be exact and not be refused."""

import torch
import torch.distributed as dist
from items_models import over
from items_steps import sharded
from kit_loops import BATCH, WIDTH, Block, Loop, adam, blocks_of, data, ddp, item, net, seeded, sgd, update
from torch import nn


@item("GradScaler that is disabled")
def disabled_scaler(rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(index):
        scaler.scale(model(data(index, rank)).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    protect = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Loop(protect, step, blocks_of(model), optimizer)


@item("GradScaler and a fused optimizer")
def fused_scaler(rank, _size):
    model = ddp(net())
    optimizer = adam(model, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(index):
        scaler.scale(model(data(index, rank)).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    protect = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Loop(protect, step, blocks_of(model), optimizer)


class Fetched:
    """The next batch, drawn during the step before. Its state is the batch itself."""

    def __init__(self):
        self.batch = self._drawn()

    def take(self):
        batch, self.batch = self.batch, self._drawn()
        return batch

    def _drawn(self):
        return torch.randn(BATCH, WIDTH)

    def state_dict(self):
        return {"batch": self.batch}

    def load_state_dict(self, state):
        self.batch = state["batch"]


@item("the next batch is fetched in the step (nanoGPT), by a protected object")
def nano_gpt(_rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    batches = Fetched()

    def step(_index):
        loss = model(batches.batch).pow(2).mean()
        batches.take()  # during the forward, before the gradients
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    protect = {"model": model, "optimizer": optimizer, "batches": batches}
    return Loop(protect, step, blocks_of(model), optimizer)


@item("the next batch is fetched in the step (nanoGPT), at the step that uses it")
def nano_gpt_in_step(_rank, _size):
    model = ddp(net())
    optimizer = adam(model)

    def step(_index):
        model(torch.randn(BATCH, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("optimizers stepped in backward, by hooks that reduce")
def in_backward(rank, size):
    model = net()
    optimizers = {f"of_{number}": sgd_of(parameter) for number, parameter in enumerate(model.parameters())}

    def hook(optimizer):
        def reduce_and_step(parameter):
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(size)
            optimizer.step()
            optimizer.zero_grad()

        return reduce_and_step

    for parameter, optimizer in zip(model.parameters(), optimizers.values(), strict=True):
        parameter.register_post_accumulate_grad_hook(hook(optimizer))

    def step(index):
        model(data(index, rank)).pow(2).mean().backward()

    return Loop({"model": model, **optimizers}, step, blocks_of(model), next(iter(optimizers.values())))


def sgd_of(parameter):
    return torch.optim.SGD([parameter], lr=0.05, momentum=0.9)


@item("optimizers stepped in backward, FSDP2")
def in_backward_fsdp(rank, _size):
    model = sharded(net())
    optimizers = {f"of_{number}": torch.optim.AdamW([each]) for number, each in enumerate(model.parameters())}
    for parameter, optimizer in zip(model.parameters(), optimizers.values(), strict=True):

        def step_one(_parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_one)

    def step(index):
        model(data(index, rank)).pow(2).mean().backward()

    return Loop({"model": model, **optimizers}, step, blocks_of(model), next(iter(optimizers.values())))


@item("weights written through .data before the update")
def behind_the_back(rank, _size):
    model = ddp(net())
    optimizer = adam(model)

    def step(index):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3 / (1 + index), 0.3)
        model(data(index, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("the module is protected without its DDP")
def inner_module(rank, _size):
    inner = net()
    model = ddp(inner)
    optimizer = adam(model)
    return Loop({"model": inner, "optimizer": optimizer}, update(model, optimizer, rank), blocks_of(model), optimizer)


class Adapted(nn.Module):
    """A frozen layer, followed by a trained one of low rank."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        x = self.base(x)
        return x + self.up(self.down(x))


@item("adapters of low rank (LoRA) on a frozen base that is not protected")
def lora(rank, _size):
    base = net()
    adapters = seeded(lambda: nn.ModuleList(Adapted(block) for block in base))
    model = ddp(nn.Sequential(*adapters))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    return Loop({"model": model, "optimizer": optimizer}, update(model, optimizer, rank), blocks_of(model), optimizer)


@item("a teacher and a metric beside the model, neither protected")
def teacher(rank, _size):
    model, elder = ddp(net()), seeded(lambda: nn.Sequential(Block(), nn.BatchNorm1d(WIDTH))).eval()
    optimizer = adam(model)
    metric = nn.Module()
    metric.register_buffer("total", torch.zeros(()))

    def step(index):
        inputs = data(index, rank)
        with torch.no_grad():
            wanted = elder(inputs)
        loss = (model(inputs) - wanted).pow(2).mean()
        metric.total.add_(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("an inner loop with an optimizer of its own in each step")
def inner_loop(rank, _size):
    model = ddp(net())
    optimizer = adam(model)

    def step(index):
        inputs = data(index, rank)
        noise = torch.zeros_like(inputs, requires_grad=True)
        attack = torch.optim.Adam([noise], lr=0.1)
        for _ in range(2):
            (-model.module(inputs + noise).pow(2).mean()).backward()
            attack.step()
            attack.zero_grad()
            model.zero_grad()
        model(inputs + noise.detach()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


class Trainer:
    """Holds an optimizer and its state, as trainers do."""

    def __init__(self, model):
        self.optimizer = sgd(model)

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])


@item("an object of the script's own has the optimizer's state")
def held_by_object(rank, _size):
    model = ddp(net())
    trainer = Trainer(model)
    loop = Loop({"model": model, "trainer": trainer}, None, blocks_of(model), trainer.optimizer)
    loop.step = update(model, trainer.optimizer, rank)
    return loop


@item("a model that another one is evaluated beside")
def evaluated_beside(rank, _size):
    other = seeded(lambda: nn.Sequential(Block(), Block())).eval()

    def look(_index):
        with torch.no_grad():
            other(data(0, rank))

    return over(ddp(net()), rank, between=look)


class Observed(nn.Module):
    """An embedding with sparse gradients, and an observer as quantization has it: a buffer that is empty at first."""

    def __init__(self):
        super().__init__()
        self.rows, self.body = nn.Embedding(50, WIDTH, sparse=True), net()
        self.register_buffer("most", torch.empty(0))

    def forward(self, x):
        rows = self.rows((x.abs() * 20).long().clamp(max=49)).mean(1)
        with torch.no_grad():
            seen = rows.abs().amax(0)
            self.most.data = torch.maximum(self.most, seen) if self.most.numel() else seen
        return self.body(rows / (1 + self.most))


@item("sparse gradients, a buffer that takes its shape in the first step, a process group for each step")
def observed(rank, size):
    model = ddp(seeded(Observed))
    rows = torch.optim.SparseAdam(model.module.rows.parameters(), lr=0.01)
    optimizer = adam(model.module.body)

    def step(index):
        group = dist.new_group(list(range(size)))
        inputs = data(index, rank)
        mean = inputs.mean(0)
        dist.all_reduce(mean, group=group)
        dist.destroy_process_group(group)
        model(inputs - mean / size).pow(2).mean().backward()
        for each in (rows, optimizer):
            each.step()
            each.zero_grad()

    return Loop({"model": model, "rows": rows, "optimizer": optimizer}, step, blocks_of(model), optimizer)
