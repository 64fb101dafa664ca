"""`deadpool-run check` on real jobs: what is exact is called exact, and what is wrong on purpose is found and named."""

import json
import os
import select
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
WRONG = Path(__file__).parent / "scripts" / "wrong.py"
PHASES = ["forward", "backward", "collective", "optimizer", "capture", "between"]
BOUND_S = 1500

pytestmark = pytest.mark.timeout(BOUND_S + 100)


@pytest.fixture
def check(tmp_path):
    """Check a script; return the exit code, what was found as JSON, and what was said."""

    def run(*line, steps=8, ranks=2):
        command = [sys.executable, "-m", "deadpool_run", "check", "--json", "--no-config", "-N", steps]
        command += ["--nproc-per-node", ranks, "--log-dir", tmp_path / "logs", *line]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("DEADPOOL_", "PET_"))}
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            cwd=tmp_path,
            env={**env, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    return run


def faults(found):
    return [run for run in found["runs"] if run["rank"] is not None]


def assert_exact(code, found, said, count, *, unmet=()):
    """`unmet`: phases that the script's steps have no place for, as they go on."""
    assert {run["result"] for run in found["runs"]} == {"exact"}, found
    assert len(faults(found)) == count, found
    assert (code, found["exact"], found["reproducible"], found["irreproducible"]) == (0, True, True, [])
    assert {run["phase"] for run in faults(found) if not run["phase_met"]} <= set(unmet), found
    assert said.count("SIGKILL to rank") == count


def assert_replaced(found):
    """Each fault did happen, and was repaired in place."""
    for run in faults(found):
        text = Path(run["output"]).read_text(encoding="utf-8")
        assert f"rank {run['rank']} (was killed by SIGKILL) goes from worker" in text, text


@pytest.mark.parametrize("count", [2, pytest.param(len(PHASES), marks=pytest.mark.slow)])
def test_every_rank_and_every_phase_of_the_minimal_recipe(check, count):
    code, found, said = check("--faults", count, RECIPES / "minimal" / "train.py", 3000)
    assert_exact(code, found, said, count)
    assert [run["launcher"] for run in found["runs"][:2]] == ["deadpool-run", "torchrun"]
    assert [run["phase"] for run in faults(found)] == PHASES[:count]
    assert {run["rank"] for run in faults(found)} == {0, 1}
    assert (found["steps"], found["ranks"]) == (8, 2)
    assert_replaced(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "arguments", "unmet"),
    [
        pytest.param("gpt", ("--parallel", "ddp"), (), id="gpt-ddp"),
        pytest.param("gpt", ("--parallel", "fsdp2"), (), id="gpt-fsdp2"),
        pytest.param("titan", ("--pp", 2, "--tp", 1, "--microbatches", 2), (), id="titan-pp2"),
    ],
)
def test_the_other_recipes(check, recipe, arguments, unmet):
    code, found, said = check(RECIPES / recipe / "train.py", *arguments)
    assert_exact(code, found, said, len(PHASES), unmet=unmet)
    assert_replaced(found)


FRAMEWORKS = {
    "huggingface": ("transformers", ("--epochs", 3, "--samples", 340, "--accumulate", 3)),
    "accelerate": ("accelerate", ("--epochs", 3, "--samples", 340, "--accumulate", 3)),
    "lightning": ("lightning", ("--epochs", 12, "--samples", 520, "--accumulate", 3, "--devices", 2)),
}


@pytest.mark.frameworks
@pytest.mark.parametrize("recipe", FRAMEWORKS)
def test_recipes_of_frameworks(check, recipe):
    framework, arguments = FRAMEWORKS[recipe]
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: make test-frameworks")
    preload = ("--preload", f"deadpool_run.integrations.{recipe}")
    code, found, said = check(*preload, RECIPES / recipe / "train.py", *arguments)
    assert_exact(code, found, said, len(PHASES))


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("unprotected_optimizer", ("optimizer", "exp_avg")),
        ("nothing_protected", ("optimizer", "AdamW")),
        ("carried_batch", ("model/0.weight", "batch")),
        ("delayed_wait", ("model/weight", "allreduce")),
        ("no_work_in_rehearsal", ("model/0.weight", "rehears", "did not end")),
        ("hidden_average", ("model/0.weight", "average")),
    ],
)
def test_a_script_that_is_wrong_is_not_called_exact(check, script, named):
    """If the library refuses it, there is no run with a fault. `named` is a word in the reason or the differences."""
    code, found, said = check("--faults", 1, "--timeout", 300, WRONG, script)
    assert (code, found["exact"]) == (1, False), found
    wrong = [run for run in found["runs"] if run["result"] != "exact"]
    assert wrong, found
    told = [text for run in wrong for text in (run["why"], *(each["name"] for each in run["differences"]))]
    assert any(word in text for word in named for text in told), found
    assert "the output of each run is in" in said


def test_weights_that_differ_only_after_a_repair_are_found_from_the_first_step(check):
    """The library's own check is turned off here: the job ends with exit code 0 and other weights."""
    code, found, _ = check("--faults", 1, WRONG, "nobody_looks")
    assert (code, found["reproducible"]) == (1, True)
    (run,) = faults(found)
    assert (run["result"], run["exit_code"], run["phase"]) == ("different", 0, "forward")
    weights = [each for each in run["differences"] if each["kind"] == "weights"]
    assert {each["name"] for each in weights} == {
        f"model/{layer}" for layer in ("0.weight", "0.bias", "2.weight", "2.bias")
    }
    # The step that was cut, or the one before if its snapshot was not committed yet.
    assert min(each["from_step"] for each in weights) in (run["step"], run["step"] + 1)


def test_weights_that_differ_from_those_with_torchrun_are_found(check):
    """Nothing is wrong before step 3, which no trial runs."""
    code, found, _ = check("--faults", 1, WRONG, "hidden_hash")
    assert (code, found["exact"], found["reproducible"], faults(found)) == (1, False, True, [])
    results = [(run["launcher"], run["result"]) for run in found["runs"]]
    assert results == [("deadpool-run", "exact"), ("torchrun", "different"), ("deadpool-run", "exact")]
    differences = found["runs"][1]["differences"]
    assert differences[0]["from_step"] == 4
    assert {each["kind"] for each in differences} == {"weights", "optimizer"}
    assert "deadpool-run gives other weights than torchrun" in found["runs"][1]["why"]


@pytest.mark.slow
def test_a_script_that_needs_deadpool_run_is_not_compared_with_torchrun(check):
    code, found, _ = check("--faults", 1, WRONG, "only_protected")
    assert code == 0, found
    (run,) = (run for run in found["runs"] if run["launcher"] == "torchrun")
    assert (run["result"], run["why"]) == (
        "not compared",
        "the script failed: RuntimeError: start me with deadpool-run",
    )


def test_a_script_that_lets_replicas_differ_by_itself_is_told_so(check):
    """The job stops, as its replicas differ soon after a repair. The check knows that they do so without one."""
    code, found, _ = check("--faults", 1, WRONG, "own_rates", steps=10)
    assert (code, found["reproducible"]) == (1, True)
    (run,) = faults(found)
    assert (run["result"], run["exit_code"]) == ("stopped", 95), found
    assert "The script does this by itself: without a fault, model/" in run["why"]
    assert "differ between ranks from step 7 on" in run["why"]


def test_a_script_that_is_never_the_same_is_told_apart(check):
    code, found, _ = check("--faults", 1, WRONG, "unseeded")
    assert (code, found["reproducible"], faults(found)) == (1, False, [])
    assert [run["result"] for run in found["runs"]] == ["exact", "different"]
    assert {each["name"] for each in found["irreproducible"]} >= {"model/weight", "model/bias"}


@pytest.mark.slow
def test_a_value_that_is_never_the_same_is_not_compared(check):
    """Nor are generators that the script does not seed."""
    code, found, _ = check("--faults", 1, WRONG, "chance")
    assert code == 0, found
    assert {"kind": "values", "name": "clock.began"} in found["not_compared"]
    assert {each["kind"] for each in found["not_compared"]} <= {"values", "generators"}


def test_a_script_without_a_step_loop_is_refused(check):
    code, found, _ = check(WRONG, "no_loop")
    (run,) = found["runs"]
    assert code == 1
    assert run["result"] == "refused"
    assert "job.steps()" in run["why"] or "protect" in run["why"]


def test_a_signal_ends_the_run_under_way(tmp_path):
    """The launcher is told too: nothing of a check stays behind."""
    os.mkfifo(tmp_path / "fifo")
    script = tmp_path / "waits.py"
    script.write_text("import time\nopen('fifo', 'w').write('here')\ntime.sleep(600)\n", encoding="utf-8")
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "deadpool_run", "check", "--no-config", "--log-dir", str(logs), str(script)]
    fifo = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path) as process:
        readable, _, _ = select.select([fifo], [], [], BOUND_S)
        os.close(fifo)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert readable, output
    assert process.returncode == 1, output
    record = json.loads((logs / "unfailed-1" / "run" / "run.json").read_text(encoding="utf-8"))
    assert (record["exit_code"], record["reason"]) == (1, "stopped by SIGTERM")
