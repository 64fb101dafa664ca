"""Training loops composed of parts, by a specification that `draw.py` makes."""

import contextlib
import copy
import random

import numpy as np
import torch
import torch.distributed as dist
from carriers import Carriers
from kit_loops import BATCH, Block, Loop, seeded
from parts import OPTIMIZERS, SCHEDULERS, Counts, Reader, Shadow, Spread, keyed, local
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

PER_EPOCH = 5


class Composed:
    """One loop with its state; `step` and `between` are the script's body."""

    def __init__(self, spec, job):
        self.spec, self.job, self.rank, self.size = spec, job, job.rank, job.world_size
        self.breach = spec.get("breach", "")
        self.width = spec["width"]
        self.spread = Spread(spec, self.rank, self.size)
        self.model = self.spread.model
        self.protect = {"model": self.model}
        self.watched = {}
        self._make_optimizers()
        self._make_companions()
        self._make_data()
        self.carriers = Carriers(spec.get("carries", ()))
        self.carried = self.late = self.best = None
        self.running = 1.0
        self.pairs = [dist.new_group([first, (first + 1) % self.size]) for first in range(0, self.size, 2)]

    def _keep(self, name, obj, breach=""):
        """Protect an object, unless the breach of this loop is to leave it unprotected."""
        (self.watched if breach and self.breach == breach else self.protect)[name] = obj

    def _make_optimizers(self):
        spec = self.spec
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kinds = spec["optimizers"][: len(trained)]
        make = [OPTIMIZERS[kind] for kind in kinds]
        if spec.get("zero_redundancy"):
            self.optimizers = [ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=0.01)]
        elif self.breach == "stepped-in-backward":
            self.optimizers = [make[0]([parameter]) for parameter in trained]
            for parameter, optimizer in zip(trained, self.optimizers, strict=True):
                parameter.register_post_accumulate_grad_hook(self._stepper(optimizer))
        else:
            self.optimizers = [each(trained[number :: len(make)]) for number, each in enumerate(make)]
        for number, optimizer in enumerate(self.optimizers):
            last = number == len(self.optimizers) - 1
            breach = "unprotected-second" if last and number else "unprotected-optimizer" if not number else ""
            self._keep(f"optimizer{number}", optimizer, breach)
        self.scheduler = None
        if spec["scheduler"]:
            self.scheduler = SCHEDULERS[spec["scheduler"]](self.optimizers[0])
            self._keep("scheduler", self.scheduler, "unprotected-scheduler")
        self.plateau = None
        if "plateau" in spec["between"]:
            self.plateau = lr_scheduler.ReduceLROnPlateau(self.optimizers[-1], patience=0)
            self._keep("plateau", self.plateau)
        self.scaler = None
        if spec["scaler"]:
            enabled = spec["scaler"] == "enabled"
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=enabled)
            self._keep("scaler", self.scaler)

    def _stepper(self, optimizer):
        def stepped(_parameter):
            if self.spread.kind == "plain":
                self.spread.reduce()
            optimizer.step()
            optimizer.zero_grad()

        return stepped

    def _make_companions(self):
        spec = self.spec
        self.average = None
        if spec["average"]:
            if spec["wrap"] == "ddp":
                average = swa_utils.AveragedModel(self.spread.bare, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
                self.average = lambda: average.update_parameters(self.spread.bare)
            else:
                average = Shadow(self.model.parameters())
                self.average = average.update
            self._keep("average", average, "unprotected-average")
        self.teacher = None
        if spec["teacher"]:
            self.teacher = seeded(lambda: Block(self.width)).eval().requires_grad_(requires_grad=False)
        self.metrics = Counts() if spec["metrics"] else None
        if spec["metrics"] == "protected":
            self._keep("metrics", self.metrics)

    def _make_data(self):
        kind, replica = self.spec["data"], self.spread.replica
        self.reader = Reader(replica)
        if kind == "protected":
            self._keep("reader", self.reader)
        generator = torch.Generator().manual_seed(7 + replica)
        dataset = TensorDataset(torch.randn(PER_EPOCH * BATCH, self.width, generator=generator))
        workers = 1 if kind == "batches-workers" else 0
        own = torch.Generator().manual_seed(replica)  # all ranks of a replica read the same data
        self.loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, generator=own)
        self.iterator = iter(self.loader) if kind == "iterator" else None

    def steps(self, job, total):
        if self.spec["data"].startswith("batches"):
            return job.batches(self.loader, steps=total)
        if self.breach == "range":
            return ((Unmanaged(index),) for index in range(total))
        return ((step,) for step in job.steps(total))

    def read(self, index, part):
        kind, replica = self.spec["data"], self.spread.replica
        if kind == "protected":
            return self.reader.next(self.width)
        if kind == "iterator":
            try:
                return next(self.iterator)[0]
            except StopIteration:
                self.iterator = iter(self.loader)
                return next(self.iterator)[0]
        x = keyed(index, part, replica, self.width)
        if kind == "global":
            noise = random.gauss(0, 0.1) + float(np.random.normal(0, 0.1))  # noqa: NPY002
            x = x + noise if self.spec["wrap"] in ("tp", "pp") else x + noise + 0.1 * torch.randn(BATCH, self.width)
        return x

    def inputs(self, index, part, batch):
        if batch:
            return batch[0][0] + 0.01 * part
        if self.breach != "carried-batch":
            return self.read(index, part)
        x = self.read(index, part) if self.carried is None else self.carried
        self.carried = self.read(index + 1, part)
        return x

    def step(self, index, *batch):
        if self.breach == "skips-rehearsal" and self.job.rehearsing:
            return
        if self.spec["head"]:
            self.others(index)
        if self.breach == "swallows":
            with contextlib.suppress(Exception):
                self.train(index, batch)
        else:
            self.train(index, batch)

    def train(self, index, batch):
        spec, last = self.spec, index % self.spec["every"] == self.spec["every"] - 1
        self.break_before(index)
        if spec["zero"] == "before":
            self.zero()
        for part in range(spec["micro"]):
            with self.spread.unsynchronized(last=last and part == spec["micro"] - 1):
                loss = self.backward(index, part, batch)
        if not last:
            return
        if self.breach != "stepped-in-backward":
            self.spread.reduce()
            self.carry(index)
            self.update()
        if spec["zero"] == "after":
            self.zero()
        if self.scheduler is not None and spec["scheduler_at"] == "inside":
            self.scheduler.step()
        if self.average is not None and spec["average"] == "inside":
            self.average()
        if spec.get("rolls_back"):
            self.roll_back(index)
        self.break_after(loss.detach())

    def carry(self, index):
        value = self.carriers.value(index, list(self.model.parameters()))
        if index >= self.spec.get("carries_from", 0):
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + 0.01 * value)

    def roll_back(self, index):
        """Keep the state at some steps, and go back to it at others. An optimizer takes over the tensors that it is given."""
        if index in (1, 6):
            states = self.model.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers]
            self.best = copy.deepcopy(states)
        elif index % 3 == 2 and self.best is not None:
            self.model.load_state_dict(self.best[0])
            for optimizer, state in zip(self.optimizers, self.best[1], strict=True):
                optimizer.load_state_dict(state)

    def break_before(self, index):
        if self.breach == "data-write":
            for parameter in self.model.parameters():
                local(parameter.data).mul_(0.999 - 0.0001 * (index % 3))
        if self.late is not None:
            work, value = self.late
            work.wait()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    local(parameter).add_(1e-3 * value)

    def break_after(self, loss):
        if self.breach == "late-collective":
            value = loss.clone()
            self.late = (dist.all_reduce(value, async_op=True), value)
        if self.breach == "carried-average":
            self.running = 0.9 * self.running + 0.1 * float(loss)
            for group in self.optimizers[0].param_groups:
                group["lr"] = 0.01 * self.running

    def zero(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.spec["to_none"])

    def backward(self, index, part, batch):
        x = self.inputs(index, part, batch)
        if self.spread.schedule is not None:
            return self.pipeline(index, part, x)
        enabled = self.scaler is not None and self.scaler.is_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = self.model(x)
            loss = y.float().pow(2).mean()
            if self.teacher is not None:
                with torch.no_grad():
                    wanted = self.teacher(x)
                loss = loss + (y.float() - wanted.float()).pow(2).mean()
        if enabled and index % 7 == 3:
            loss = loss * float("inf")  # a step that the scaler skips
        if self.metrics is not None and enabled is False:
            self.metrics.update(loss)
        loss = loss / self.spec["micro"]
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def pipeline(self, index, part, x):
        spread = self.spread
        if spread.stage == 0:
            spread.schedule.step(x)
        elif spread.stage == spread.stages - 1:
            spread.schedule.step(target=keyed(index, 50 + part, spread.replica, self.width))
        else:
            spread.schedule.step()
        return sum(parameter.grad.pow(2).sum() for parameter in self.model.parameters())

    def update(self):
        if self.spec["clip"]:
            for optimizer in self.optimizers if self.scaler is not None else ():
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    # --- between steps -------------------------------------------------------------------------------------------------

    def between(self, index):
        if self.breach == "skips-rehearsal" and self.job.rehearsing:
            return
        if self.scheduler is not None and self.spec["scheduler_at"] == "between":
            self.scheduler.step()
        if self.average is not None and self.spec["average"] == "between":
            self.average()
        if not self.spec["head"]:
            self.others(index)

    def others(self, index):
        if index % self.spec["between_every"] == self.spec["between_every"] - 1:
            for name in self.spec["between"]:
                getattr(self, f"do_{name}")(index)

    def first(self):
        return local(next(iter(self.model.parameters()))).flatten()[:2].clone()

    def do_evaluate(self, index):
        if self.spread.schedule is not None:
            return self.do_metric(index)
        self.model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for number in range(2):
                out = self.model(keyed(500 + number, 9, self.spread.replica, self.width))
                total += local(out).pow(2).mean()
        dist.all_reduce(total)
        self.model.train()
        return total

    def do_metric(self, _index):
        value = self.first().sum() if self.first().numel() else torch.zeros(())
        dist.all_reduce(value)
        return value

    def do_plateau(self, index):
        self.plateau.step(float(self.do_evaluate(index)))

    def do_gather(self, index):
        every = [torch.zeros(2) for _ in range(self.size)]
        dist.all_gather(every, torch.full((2,), float(index + self.rank)))
        assert sum(each[0] for each in every) >= 0

    def do_objects(self, index):
        every = [None] * self.size
        dist.all_gather_object(every, {"rank": self.rank, "step": index})
        if not self.job.interrupted:
            assert [each["rank"] for each in every] == list(range(self.size))

    def do_broadcast(self, _index):
        told = torch.rand(1)
        dist.broadcast(told, 0)
        for optimizer in self.optimizers[:1]:
            optimizer.param_groups[0]["lr"] = float(0.01 + 0.01 * told)

    def do_barrier(self, _index):
        dist.barrier()

    def do_subgroup(self, _index):
        value = torch.ones(2)
        for group in self.pairs:
            if dist.get_rank(group) >= 0:
                dist.all_reduce(value, group=group)

    def do_async(self, index):
        values = [torch.full((3,), float(index)), torch.full((5,), float(self.rank))]
        for work in [dist.all_reduce(value, async_op=True) for value in values]:
            work.wait()

    def do_print(self, index):
        if self.rank == 0 and not self.job.rehearsing:
            print(f"step {index}", flush=True)


class Unmanaged:
    """A stand-in for a step, in a loop over a range."""

    def __init__(self, index):
        self.index = index

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def compose(spec, job):
    """Return the loop of a specification."""
    made = Composed(copy.deepcopy(spec), job)
    return Loop(
        made.protect,
        made.step,
        [module for module in made.model.modules() if isinstance(module, Block)],
        made.optimizers[0],
        made.between,
        made.steps,
        told=lambda step, _batch: step.epoch,
        watched=made.watched,
        grads=spec["every"] > 1,
    )
