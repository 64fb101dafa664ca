"""Items with different optimizers, schedulers, and reductions of gradients."""

import contextlib
import copy
import math

import torch
from items_models import over
from items_steps import sharded
from kit.eight_bits import OfEightBits
from kit_loops import Loop, blocks_of, data, ddp, item, net, sgd, update
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler


def trained(make, rank, *, before=None):
    model = ddp(net())
    optimizer = make(model)
    protect = {"model": model, "optimizer": optimizer}
    return Loop(protect, update(model, optimizer, rank, before=before), blocks_of(model), optimizer)


@item("SGD with momentum, made at the first step")
def plain_sgd(rank, _size):
    return trained(lambda model: sgd(model, nesterov=True), rank)


@item("Adam, amsgrad")
def amsgrad(rank, _size):
    return trained(lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True), rank)


@item("Adafactor")
def adafactor(rank, _size):
    return trained(lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01), rank)


@item("LBFGS, which runs forward and backward itself")
def lbfgs(rank, _size):
    model = ddp(net(1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(index):
        def closure():
            optimizer.zero_grad()
            loss = model(data(index, rank)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


class Lazy(torch.optim.Optimizer):
    """Makes state when it needs it, drops some of it later, and keeps much of it outside tensors."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr, "calls": 0, "phase": "warm"})
        self.largest = 0.0

    def state_dict(self):
        return {**super().state_dict(), "largest": self.largest}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["calls"] += 1
            group["phase"] = "warm" if group["calls"] < 4 else ("cold", group["calls"])
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                state["count"] = state.get("count", 0) + 1
                if state["count"] >= 2 and parameter.dim() == 2:  # factored, after the first step
                    state.setdefault("rows", torch.zeros(grad.shape[0], 1))
                    state.setdefault("columns", torch.zeros(1, grad.shape[1]))
                    state["rows"].lerp_(grad.pow(2).mean(1, keepdim=True), 0.1)
                    state["columns"].lerp_(grad.pow(2).mean(0, keepdim=True), 0.1)
                if state["count"] % 3 == 0:
                    state["last"] = grad.clone()
                elif state["count"] % 3 == 2:
                    state.pop("last", None)
                self.largest = max(0.9 * self.largest, float(grad.abs().max()))
                state["history"] = [*state.get("history", [])[-2:], self.largest]
                state["nested"] = {"norm": math.sqrt(sum(state["history"])), "of": (state["count"], "steps")}
                scale = 1 + state["nested"]["norm"] + float(state.get("rows", grad).abs().mean())
                parameter.sub_(grad / scale + 0.1 * state.get("last", torch.zeros(())), alpha=group["lr"])


@item("an optimizer with lazy and non-tensor state")
def lazy(rank, _size):
    return trained(lambda model: Lazy(model.parameters()), rank)


@item("an optimizer whose state is tensors that consist of others (torchao's 8 bits)")
def eight_bits(rank, _size):
    return trained(lambda model: OfEightBits(model.parameters()), rank)


@item("an optimizer whose state is tensors that consist of others, FSDP2")
def eight_bits_sharded(rank, _size):
    model = sharded(net())
    optimizer = OfEightBits(model.parameters())
    return Loop({"model": model, "optimizer": optimizer}, update(model, optimizer, rank), blocks_of(model), optimizer)


class Lookahead(torch.optim.Optimizer):
    """A wrapper, as libraries write it: it does not call `Optimizer.__init__`, but has hooks of `step()`.

    Slow weights follow those of the optimizer inside.
    """

    def __init__(self, inner):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._patch_step_function()
        self.inner, self.param_groups, self.state, self.fast = inner, inner.param_groups, {}, inner.state
        self.calls = 0

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.calls += 1
        for group in self.param_groups if self.calls % 3 == 0 else ():
            for parameter in group["params"]:
                slow = self.state.setdefault(parameter, parameter.clone())
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def zero_grad(self):
        self.inner.zero_grad()


@item("an optimizer around another one, with weights and a count of its own")
def around(rank, _size):
    model = ddp(net())
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = Lookahead(inner)
    return Loop({"model": model, "optimizer": optimizer}, update(model, optimizer, rank), blocks_of(model), inner)


@item("a roll back to weights and an optimizer's state that are kept in a variable")
def rolled_back(rank, _size):
    """`load_state_dict()` of the optimizer takes over the tensors of the variable: later updates change both."""
    model = ddp(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train, best = update(model, optimizer, rank), None

    def step(index):
        nonlocal best
        train(index)
        if index == 1:
            best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        elif index % 4 == 3:
            model.load_state_dict(best[0])
            optimizer.load_state_dict(best[1])

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.7),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        [4],
    ),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
}


@item("LR schedulers")
def schedulers(rank, _size):
    """One scheduler of each kind, each with its own optimizer and model. Half of them step in the block, half after it."""
    models = {name: ddp(net(1)) for name in SCHEDULERS}
    optimizers = {name: sgd(model) for name, model in models.items()}
    made = {name: make(optimizers[name]) for name, make in SCHEDULERS.items()}
    inside = list(made.values())[::2]
    outside = list(made.values())[1::2]

    def step(index):
        sum(model(data(index, rank)).pow(2).mean() for model in models.values()).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in inside:
            scheduler.step()

    def between(_index):
        for scheduler in outside:
            scheduler.step()

    protect = {
        f"{kind}.{name}": obj
        for kind, objects in (("model", models), ("optimizer", optimizers), ("scheduler", made))
        for name, obj in objects.items()
    }
    blocks = [block for model in models.values() for block in blocks_of(model)]
    return Loop(protect, step, blocks, optimizers["LambdaLR"], between)


@item("ZeroRedundancyOptimizer")
def zero(rank, _size):
    return trained(lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01), rank)


@item("ZeroRedundancyOptimizer, parameters as views, with a scheduler")
def zero_views(rank, _size):
    loop = trained(
        lambda model: ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.05, momentum=0.9
        ),
        rank,
    )
    scheduler = lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    loop.protect["scheduler"] = scheduler
    loop.between = lambda _index: scheduler.step()
    return loop


@item("DDP communication hook: fp16_compress_hook")
def fp16_hook(rank, _size):
    model = ddp(net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return over(model, rank)


@item("DDP communication hook: PowerSGD")
def power_sgd(rank, _size):
    model = ddp(net(), bucket_cap_mb=25)  # with more than one bucket the hook hangs on Gloo, under torchrun too
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    loop = over(model, rank)
    loop.watched["hook"] = Seen(state)
    return loop


class Seen:
    """A hook's state, with a state_dict for the digest."""

    def __init__(self, state):
        self._state = state

    def state_dict(self):
        names = ("iter", "error_dict", "q_memory_dict")
        found = {name: getattr(self._state, name) for name in names}
        return {**found, "rng": self._state.rng.get_state()[1]}


@item("DDP, gradients as views of buckets, static graph")
def views(rank, _size):
    return over(ddp(net(), gradient_as_bucket_view=True, static_graph=True), rank)


@item("DDP, gradients as views of buckets, accumulated over steps")
def views_over_steps(rank, _size):
    """A replacement has no gradients when it gets those of the state, because its rehearsal ends with an update."""
    model = ddp(net(), gradient_as_bucket_view=True)
    optimizer = sgd(model)

    def step(index):
        model(data(index, rank)).pow(2).mean().backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer, grads=True)


def views_without_reduction(rank, *, to_none):
    """Gradients under no_sync(): outside the bucket after an update that dropped them, in it after one that zeroed them."""
    model = ddp(net(), gradient_as_bucket_view=True)
    optimizer = sgd(model)

    def step(index):
        last = index % 3 == 2
        with contextlib.nullcontext() if last else model.no_sync():
            model(data(index, rank)).pow(2).mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer, grads=True)


@item("DDP, gradients as views of buckets, no_sync over steps, dropped")
def views_dropped(rank, _size):
    return views_without_reduction(rank, to_none=True)


@item("DDP, gradients as views of buckets, no_sync over steps, zeroed")
def views_zeroed(rank, _size):
    return views_without_reduction(rank, to_none=False)


@item("a fused optimizer, a learning rate that is a tensor")
def fused(rank, _size):
    model = ddp(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    protect = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Loop(protect, update(model, optimizer, rank), blocks_of(model), optimizer, lambda _index: scheduler.step())
