"""`train.py` that creates a group of all ranks in step 4."""

import torch.distributed as dist
from stepped import train_with


def grouped(training, step):
    def run(index):
        if index == 4:
            training.group = dist.new_group()
        return step(index)

    return run


if __name__ == "__main__":
    train_with(grouped)
