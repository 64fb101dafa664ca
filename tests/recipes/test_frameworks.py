"""Frameworks that own the training loop: a rank is killed at a random step, and the weights are those of torchrun."""

import difflib
import random
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from launches import ORDERLY, RECIPES, TORCHRUN, kill_rank, launched

DIGEST = re.compile(r"rank (\d+): .*?digest ([0-9a-f]{64})")  # torchrun's workers may write into each other's lines
HUGGING_FACE = ("--epochs", 9, "--samples", 340, "--accumulate", 3)  # an odd number of batches: a last update of fewer
RUNS = {
    "huggingface": ("transformers", (*HUGGING_FACE, "--log-every", 1), "'grad_norm'"),
    "accelerate": ("accelerate", (*HUGGING_FACE, "--print-every", 3), "loss "),
    "lightning": ("lightning", ("--epochs", 36, "--samples", 520, "--accumulate", 3, "--devices", 2), " loss "),
}
"""By recipe: its framework, its arguments, and what it prints about once in a step or a few. A run takes some seconds, so that
`kill-rank` comes before its end."""
SCRIPTS = Path(__file__).parent / "scripts"
ONE_DATASET = SCRIPTS / "one_dataset.py"
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
LAST_PART = {
    "test_script": "**Test reinstantiated state**",
    "test_ops": "testing sending tensors across devices",
    "test_sync": "gradient accumulation with optimizer and scheduler",
}
"""By script of Accelerate's own tests: what it prints before its last part."""


def digests(text):
    found = dict(DIGEST.findall(text))
    assert set(found) == {"0", "1"}, text
    return found


@pytest.mark.frameworks
@pytest.mark.parametrize("recipe", RUNS)
def test_a_killed_rank_does_not_change_a_bit(start, tmp_path, recipe):
    framework, arguments, line = RUNS[recipe]
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: make test-frameworks")
    folder = RECIPES / recipe
    expected = digests(start(*TORCHRUN, "--nproc-per-node", 2, ORDERLY, folder / "train_torchrun.py", *arguments).end())
    preloaded = ("--preload", f"deadpool_run.integrations.{recipe}")
    run = start(*launched(tmp_path, 2), *preloaded, folder / "train.py", *arguments)
    count, rank = random.randint(3, 12), random.randrange(2)
    run.wait_for(f"{count} lines", lambda: run.text().count(line) >= count)
    kill_rank(tmp_path, rank)
    text = run.end()
    assert f"recovered rank {rank} (injected) on " in text, text
    assert digests(text) == expected, f"rank {rank} killed after {count} lines:\n{text}"


@pytest.mark.frameworks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAST_PART)
def test_accelerates_own_tests_pass(start, tmp_path, name):
    """As under torchrun: on plain Gloo, in a script that knows nothing of us, and on our backend."""
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed: make test-frameworks")
    module = f"accelerate.test_utils.scripts.{name}"
    for launch in (
        (*TORCHRUN, "--nproc-per-node", 2, ONE_DATASET, ORDERLY),
        (*launched(tmp_path / "plain", 2), ONE_DATASET, ORDERLY),
        (*launched(tmp_path / "ours", 2), ONE_DATASET, SCRIPTS / "initialized.py"),
    ):
        assert LAST_PART[name] in start(*launch, module, env=ON_CPU).end()


PAGE = RECIPES.parent / "docs" / "frameworks.md"


@pytest.mark.parametrize("recipe", [*RUNS, "titan", "minimal"])
def test_the_page_says_how_many_lines_change(recipe):
    """Blank lines and what is only indented further do not count, nor do the imports, which are told apart."""
    one, other = (
        [line.strip() for line in (RECIPES / recipe / name).read_text().splitlines() if line.strip()]
        for name in ("train_torchrun.py", "train.py")
    )
    added = [line[1:] for line in list(difflib.unified_diff(one, other, n=0, lineterm=""))[2:] if line[0] == "+"]
    imports = [line for line in added if line.startswith(("import ", "from "))]
    remark = ", no framework" if recipe == "minimal" else ""
    row = f"| [{recipe}](../recipes/{recipe}/){remark} | {len(imports)} | {len(added) - len(imports)} |"
    assert row in PAGE.read_text(encoding="utf-8"), row
    assert len(added) <= 10
