"""Train a small transformer on a mesh of pipeline, data and tensor parallelism, with distributed checkpoints."""

import argparse
import ctypes
import hashlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import LENGTH, WORDS, build
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import deadpool_run as deadpool


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument(
        "--checkpoint-every", type=int, default=0, help="write a distributed checkpoint every so many steps"
    )
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--print-every", type=int, default=10)
    return parser.parse_args()


def batch(step, replica, size):
    """Return sequences that count up from random numbers: a pure function of the step and the replica."""
    start = torch.randint(WORDS, (size, 1), generator=torch.Generator().manual_seed(step * 1000 + replica))
    tokens = (start + torch.arange(LENGTH + 1)) % WORDS
    return tokens[:, :-1], tokens[:, 1:]


def clip(parameters, stages, limit=1.0):
    """Clip the gradients by their norm over the whole model: of this stage by mesh, then over the stages."""
    by_mesh = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in of_mesh]).full_tensor() for of_mesh in by_mesh.values()]
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares, group=stages)
    for of_mesh in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(of_mesh, limit, squares.sqrt())


def due(args, number):
    """Return whether a checkpoint is written after this step."""
    return args.checkpoint_every and (number + 1) % args.checkpoint_every == 0


def digest(model, optimizer):
    """Return a hash of this rank's part of the weights and of the optimizer's state."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(state[name] for name in ("exp_avg", "exp_avg_sq"))):
            local = tensor.to_local().cpu().contiguous()
            sha.update(ctypes.string_at(local.data_ptr(), local.nbytes))
    return sha.hexdigest()


def main():
    args = options()
    job = deadpool.init()
    device, size = job.device, dist.get_world_size()
    shape = (args.pp, size // args.pp // args.tp, args.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    index, stages, replica = mesh.get_local_rank("pp"), mesh["pp"].size(), mesh.get_local_rank("dp")
    model = build(index, stages, mesh).to(device)
    stage = PipelineStage(model, index, stages, device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(
        stage, args.microbatches, lambda y, targets: functional.cross_entropy(y.flatten(0, 1), targets.flatten())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)

    for step in job.steps(args.steps):
        number = step.index
        with step:
            inputs, targets = batch(number, replica, 2 * args.microbatches)
            losses = []
            if index == 0:
                schedule.step(inputs.to(device))
            elif index == stages - 1:
                schedule.step(target=targets.to(device), losses=losses)
            else:
                schedule.step()
            clip(list(model.parameters()), mesh.get_group("pp"))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if dist.get_rank() == size - 1 and number % args.print_every == 0:
                print(f"step {number} loss {torch.stack(losses).mean().item():.4f}", flush=True)
        if due(args, number) and not (job.rehearsing or job.interrupted):
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{args.checkpoints}/{number + 1}")
    print(f"rank {dist.get_rank()}: digest {digest(model, optimizer)}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(): a model that outlives its group can hang in its destructor
