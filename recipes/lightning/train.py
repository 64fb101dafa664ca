"""A small network with dropout and batch norm, trained by Lightning."""

import lightning
import torch
import torch.distributed as dist
from common import Net, Waves, digest, options
from torch.utils.data import DataLoader

from deadpool_run.integrations.lightning import ProtectedDDPStrategy


def main():
    args = options(__doc__)
    lightning.seed_everything(1, verbose=False)
    module = Net()
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        devices=args.devices,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy=ProtectedDDPStrategy(),
        accumulate_grad_batches=args.accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(Waves(args.samples), batch_size=8, shuffle=True),
        DataLoader(Waves(64), batch_size=8),
    )
    result = digest(module, trainer.optimizers[0])
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps, digest {result}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(): a model that outlives its group can hang in its destructor
