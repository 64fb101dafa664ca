"""The sdist and the wheel, built in a clean environment, installed in another one, and run from outside the tree."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
"""A download of torch on a slow line, or a job of a few steps on a machine with much other work."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * LIMIT_S), pytest.mark.xdist_group("dist")]


def environment_at(home):
    """Make a virtual environment; return its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=LIMIT_S)
    return home / "bin"


def install(programs, *what):
    command = [programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *what]
    subprocess.run(command, check=True, timeout=LIMIT_S)


@pytest.fixture(scope="session")
def built(request, tmp_path_factory):
    """The folder with the sdist, and the wheel that was built from it."""
    home = tmp_path_factory.mktemp("build")
    given = request.config.getoption("--artefacts", default=None)
    folder = Path(given).absolute() if given else home / "dist"
    for old in folder.glob("deadpool_run-*"):
        old.unlink()
    programs = environment_at(home / "environment")
    install(programs, "build")
    command = [programs / "python", "-m", "build", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def unpacked(built, tmp_path_factory):
    """The tree of the sdist, outside of ours."""
    (found,) = built.glob("*.tar.gz")
    home = tmp_path_factory.mktemp("sdist")
    with tarfile.open(found) as archive:
        archive.extractall(home, filter="data")
    (tree,) = home.iterdir()
    return tree


@pytest.fixture(scope="session")
def programs(wheel, tmp_path_factory):
    """The folder of programs of an environment with the wheel, and nothing of ours beside it."""
    found = environment_at(tmp_path_factory.mktemp("installed") / "environment")
    index = os.environ.get("TORCH_INDEX")
    install(found, "torch", *(("--index-url", index) if index else ()))
    install(found, wheel)
    return found


def environment_of(home):
    """The environment of a user with this home: records of runs are below it."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("DEADPOOL_", "PET_", "PYTHON"))}
    return {**own, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "OMP_NUM_THREADS": "1"}


def run(program, *words, home):
    """Run a program as a user does: in a folder and with records of its own."""
    return subprocess.run(
        [program, *map(str, words)],
        cwd=home,
        env=environment_of(home),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_the_wheel_has_the_package_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].removesuffix(".dist-info") for name in names} == {
        "deadpool_run",
        wheel.name.removesuffix("-py3-none-any.whl"),
    }
    assert "deadpool_run/py.typed" in names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "deadpool_run").rglob("*.py")}
    assert sources <= set(names)


@pytest.fixture
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_metadata_has_the_license_the_pythons_and_the_readme(metadata):
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert metadata.get_payload().startswith("# deadpool-run\n")


def test_the_metadata_names_no_address_and_no_person_because_none_is_public_yet(metadata):
    named = {"Project-URL", "Home-page", "Author", "Author-email", "Maintainer", "Maintainer-email"}
    assert named & set(metadata.keys()) == set()


def test_the_sdist_has_all_that_its_tests_and_docs_need(unpacked):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    hidden_or_ci = (".ci/", ".gitignore")
    expected = {name for name in tracked.splitlines() if not name.startswith(hidden_or_ci)}
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert expected - found == set()
    assert found - expected <= {"PKG-INFO", ".gitignore"}


def test_the_program_says_its_version_and_help(programs, wheel, tmp_path):
    version = run(programs / "deadpool-run", "--version", home=tmp_path)
    assert (version.returncode, version.stdout) == (0, f"deadpool-run {wheel.name.split('-')[1]}\n")
    told = run(programs / "deadpool-run", "--help", home=tmp_path)
    assert told.returncode == 0
    assert "--nproc-per-node" in told.stdout


def test_without_a_run_status_says_so(programs, tmp_path):
    assert run(programs / "deadpool-run", "status", home=tmp_path).returncode == 4


def test_a_killed_rank_is_replaced_and_weights_are_equal(programs, unpacked, tmp_path):
    found = run(programs / "python", unpacked / "recipes" / "gpt" / "demo.py", "--steps", 200, home=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "The weights are the same, bit for bit." in found.stdout


DIES_ONCE = """
import os
import signal
import torch
import deadpool_run as deadpool

job = deadpool.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
job.protect(model=model, optimizer=optimizer)
for step in job.steps(20):
    with step:
        if step.index == 5 and job.rank == 1 and os.environ["DEADPOOL_REPLACEMENT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if step.index == 10 and job.rank == 0 and "GATE" in os.environ:
            print("holds", flush=True)
            open(os.environ["GATE"]).readline()
        torch.distributed.all_reduce(torch.ones(1))
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"rank {job.rank} of process {os.getppid()}, replaced {os.environ['DEADPOOL_REPLACEMENT']}", flush=True)
"""
CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c"]
SMALL_SHM = 'mount -t tmpfs -o size=64k shm /dev/shm && exec "$@"'


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces here")
def test_process_1_of_a_container_with_little_shared_memory_repairs(programs, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DIES_ONCE)
    launch = (programs / "deadpool-run", "--nproc-per-node", 2, "--spares", 1, script)
    found = run(CONTAINER[0], *CONTAINER[1:], SMALL_SHM, "sh", *launch, home=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    said = "rank 0 of process 1, replaced 0", "rank 1 of process 1, replaced 1"
    assert sorted(found.stdout.splitlines()) == list(said)


def test_status_shows_a_live_run_and_report_one_that_has_ended(programs, tmp_path):
    deadpool, gate, script = programs / "deadpool-run", tmp_path / "gate", tmp_path / "script.py"
    script.write_text(DIES_ONCE)
    os.mkfifo(gate)
    said = []
    with (
        gate.open("r+b", buffering=0) as opened,
        subprocess.Popen(
            [deadpool, "--run-id", "small", "--nproc-per-node", "2", "--spares", "1", script],
            cwd=tmp_path,
            env={**environment_of(tmp_path), "GATE": str(gate)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as job,
    ):
        try:
            while (line := job.stdout.readline()) not in {"holds\n", ""}:
                said.append(line)
            shown = run(deadpool, "status", home=tmp_path)
            told = run(deadpool, "status", "--json", home=tmp_path)
        finally:
            opened.write(b"\n")
        said += job.stdout
    assert job.returncode == 0, "".join(said)
    assert shown.returncode in {0, 3}, shown.stderr  # 3: the next spare is not ready yet
    assert shown.stdout.startswith("run small")
    status = json.loads(told.stdout)
    assert (status["phase"], len(status["ranks"]), len(status["incidents"])) == ("running", 2, 1)
    written = run(deadpool, "report", "small", "-o", "small.html", home=tmp_path)
    assert written.returncode == 0, written.stderr
    page = (tmp_path / "small.html").read_text()
    assert "was killed by SIGKILL" in page
    assert "every rank finished" in page


def test_check_finds_the_tutorials_script_exact(programs, unpacked, tmp_path):
    script = unpacked / "recipes" / "tutorial" / "train.py"
    words = ("check", "--no-config", "--faults", 1, "--nproc-per-node", 2, script)
    found = run(programs / "deadpool-run", *words, home=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1 of 1 exact" in found.stdout
