"""A small GPT-2 with random weights, trained by Hugging Face's Trainer."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import deadpool_run as deadpool
from deadpool_run.integrations.huggingface import protect


class Sequences(Dataset):
    """Sequences that count up from a random number: created on access, always the same."""

    def __init__(self, count, length=32, words=64):
        self.count, self.length, self.words = count, length, words

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = torch.randint(self.words, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(self.length)) % self.words
        return {"input_ids": tokens, "labels": tokens}


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--out", default="out")
    return parser.parse_args()


def digest(trainer):
    """Return a hash of the weights and of the optimizer's state."""
    sha = hashlib.sha256()
    optimizer = trainer.optimizer.optimizer
    for parameter in trainer.model.parameters():
        for tensor in (parameter, *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))):
            sha.update(tensor.detach().cpu().numpy().tobytes())
    return sha.hexdigest()


def main():
    options_ = options()
    deadpool.init()
    arguments = TrainingArguments(
        output_dir=options_.out,
        use_cpu=not torch.cuda.is_available(),
        num_train_epochs=options_.epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options_.accumulate,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=options_.log_every,
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
        train_dataset=Sequences(options_.samples),
        eval_dataset=Sequences(32),
    )
    protect(trainer)
    trainer.train()
    print(f"rank {dist.get_rank()}: {trainer.state.global_step} steps, digest {digest(trainer)}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(): a model that outlives its group can hang in its destructor
