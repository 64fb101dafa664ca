"""A small GPT-2 with random weights, trained by Hugging Face's Trainer."""

import torch
import torch.distributed as dist
from common import Sequences, digest, options
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import deadpool_run as deadpool
from deadpool_run.integrations.huggingface import protect


def main():
    args = options(__doc__)
    deadpool.init()
    arguments = TrainingArguments(
        output_dir=args.out,
        use_cpu=not torch.cuda.is_available(),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=args.log_every,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Sequences(args.samples),
        eval_dataset=Sequences(32),
    )
    protect(trainer)
    trainer.train()
    print(f"rank {dist.get_rank()}: {trainer.state.global_step} steps, digest {digest(trainer)}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(): a model that outlives its group can hang in its destructor
