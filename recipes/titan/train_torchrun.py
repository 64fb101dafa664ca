"""Train a small transformer on a mesh of pipeline, data and tensor parallelism, with distributed checkpoints."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import batch, clip, digest, due, options
from model import build
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional


def main():
    args = options(__doc__)
    dist.init_process_group("gloo")
    device, size = torch.device("cpu"), dist.get_world_size()
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

    for number in range(args.steps):
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
        if due(args, number):
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{args.checkpoints}/{number + 1}")
    print(f"rank {dist.get_rank()}: digest {digest(model, optimizer)}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(): a model that outlives its group can hang in its destructor
