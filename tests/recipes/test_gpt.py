import subprocess
import sys

import pytest
from kit.choice import often
from launches import PYTHON, RECIPES, TORCHRUN, kill_rank, launched

TRAIN = RECIPES / "gpt" / "train.py"


def flags(home, *more):
    """Return the script's arguments, with folders for its digests and step log under `home`."""
    for name in ("steps", "digests"):
        (home / name).mkdir(parents=True)
    return ("--step-log", home / "steps", "--digest-dir", home / "digests", *more)


def digests(home):
    return {path.name: path.read_text() for path in (home / "digests").iterdir()}


def completed(home, rank):
    """Return the steps of each completed line of this rank's log."""
    path = home / "steps" / f"rank{rank}"
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("parallel", often(["ddp", "fsdp2"], {"ddp"}))
def test_runs_under_plain_python(start, tmp_path, parallel):
    text = start(
        *PYTHON, TRAIN, *flags(tmp_path / "a", "--parallel", parallel, "--steps", 10, "--print-every", 5)
    ).end()
    assert "step    10  loss " in text
    assert set(digests(tmp_path / "a")) == {"rank0"}
    assert completed(tmp_path / "a", 0) == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "number"), [("ddp", 200), ("fsdp2", 100)])
def test_a_killed_rank_does_not_change_a_bit(start, tmp_path, parallel, number):
    """The reference is torchrun with plain Gloo: neither protection nor a repair may change the arithmetic.

    So many steps last long enough for a rank to be killed a quarter of the way.
    """
    script = ("--parallel", parallel, "--steps", number, "--print-every", 50)
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    start(*TORCHRUN, "--nproc-per-node", 2, TRAIN, *flags(plain, *script)).end()
    run = start(*launched(tmp_path, 2), TRAIN, *flags(killed, *script))
    run.wait_for("a quarter", lambda: min(map(len, (completed(killed, 0), completed(killed, 1)))) > number // 4)
    kill_rank(tmp_path, 0)
    run.end()
    assert digests(killed) == digests(plain)
    for rank in (0, 1):
        steps = completed(killed, rank)
        assert set(steps) == set(range(number))
        assert len(steps) <= number + 1, "more than one step was repeated"


@pytest.mark.slow
def test_another_run_has_another_digest(start, tmp_path):
    """The comparison of digests can fail."""
    for name, steps in (("a", 5), ("b", 6)):
        start(*PYTHON, TRAIN, *flags(tmp_path / name, "--steps", steps)).end()
    assert digests(tmp_path / "a") != digests(tmp_path / "b")


def test_the_demo_shows_that_nothing_was_lost():
    demo = [sys.executable, RECIPES / "gpt" / "demo.py", "--steps", "320", "--limit-s", "60"]
    done = subprocess.run(demo, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "took its place" in done.stdout
    assert done.stdout.count("  equal") == 2
