"""A mesh of pipeline, data and tensor parallelism, with distributed checkpoints."""

import random
import re

import pytest
import torch.distributed.checkpoint as dcp
from launches import ORDERLY, RECIPES, TORCHRUN, kill_rank, launched

FOLDER = RECIPES / "titan"


def digests(text, ranks):
    found = dict(re.findall(r"rank (\d+): digest ([0-9a-f]{64})", text))
    assert len(found) == ranks, text
    return found


def reference(tmp_path, ranks):
    """Return what starts an unfailed run: the plain script under torchrun, but for two ranks, as that takes long to start."""
    if ranks == 2:
        (tmp_path / "unfailed").mkdir()
        return (*launched(tmp_path / "unfailed", ranks, spares=0), FOLDER / "train.py")
    return (*TORCHRUN, "--nproc-per-node", ranks, ORDERLY, FOLDER / "train_torchrun.py")


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        pytest.param(2, ("--pp", 2, "--tp", 1), id="pp2"),
        pytest.param(4, ("--pp", 2, "--tp", 2), id="pp2-tp2", marks=pytest.mark.slow),
        pytest.param(4, ("--pp", 2, "--tp", 1), id="pp2-dp2", marks=pytest.mark.slow),
        pytest.param(8, ("--pp", 2, "--tp", 2), id="pp2-dp2-tp2", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_does_not_change_a_bit(start, tmp_path, ranks, shape):
    steps = 24
    arguments = (*shape, "--steps", steps, "--microbatches", 2, "--print-every", 1)
    expected = digests(start(*reference(tmp_path, ranks), *arguments).end(), ranks)
    run = start(*launched(tmp_path, ranks), FOLDER / "train.py", *arguments, "--checkpoint-every", steps)
    count, rank = random.randint(2, 5), random.randrange(ranks)
    run.wait_for(f"step {count}", lambda: f"step {count} loss" in run.text())
    kill_rank(tmp_path, rank)
    text = run.end()
    assert f"recovered rank {rank} (injected) on " in text, text
    assert digests(text, ranks) == expected, f"rank {rank} killed after step {count}:\n{text}"
    metadata = dcp.FileSystemReader(tmp_path / "checkpoints" / str(steps)).read_metadata()
    assert {"model.words.weight", "model.output.weight"} <= set(metadata.state_dict_metadata)
