"""A small GPT-2 with random weights, trained in a loop with Hugging Face's Accelerate."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from common import Sequences, digest, options
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


def main():
    args = options(__doc__)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=40)
    loader = DataLoader(Sequences(args.samples), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    count = 0
    for _epoch in range(args.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            count += 1
            if count % args.print_every == 0:
                accelerator.print(f"loss {loss.item():.4f}", flush=True)
    print(f"rank {dist.get_rank()}: digest {digest(model, optimizer.optimizer)}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(): a model that outlives its group can hang in its destructor
