"""GPUs that fail, as NVML reports it to a real agent. The NVML is a fake one, built here; no worker uses a GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kit.cluster import SCRIPTS

STEPS = 25
ECC, XID, GONE = 2, 8, 0

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    """Return the folder of the fake library."""
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def start(cluster, nvml, tmp_path):
    """Start a job on a machine with five GPUs; return it, and what has the driver report an event."""
    events = tmp_path / "nvml-events"
    events.touch()

    def happen(gpu, kind, data=0):
        with events.open("a", encoding="utf-8") as file:
            file.write(f"{gpu} {kind} {data}\n")

    def on_gpus(python, _m, _deadpool_run, *words):
        return (python, str(SCRIPTS / "with_gpus.py"), *words)

    def make(*words, **env):
        paths = f"{nvml}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        env |= {"LD_LIBRARY_PATH": paths, "FAKE_NVML": str(events)}
        words = ("--layout", "ddp-full", "--steps", str(STEPS), *words)
        return cluster(*words, within=on_gpus, env=env), happen

    return make


def line(gpu, why):
    return f"GPU {gpu} of node localhost failed, and is avoided: {why}"


def places(job, rank):
    """Return the local ranks of a rank's processes, in their order."""
    found = {event["pid"]: event["local_rank"] for event in job.account.of("state", rank=rank)}
    return [found[pid] for pid in job.account.pids(rank)]


def test_the_status_tells_the_use_of_each_ranks_gpu(start):
    job, _ = start("--hold", "6", CUDA_VISIBLE_DEVICES="3,1,2,GPU-0,4")
    job.wait_event("held")
    ranks = job.wait_status(
        lambda status: status["ranks"] if all(rank["gpu_memory_bytes"] for rank in status["ranks"]) else None, "use"
    )
    assert [(rank["gpu_percent"], rank["gpu_memory_bytes"]) for rank in ranks[:2]] == [(35, 4e9), (None, 2e9)]
    assert all(rank["memory_bytes"] > 1 << 20 for rank in ranks)
    job.wait_status(lambda status: all(rank["cpu_cores"] is not None for rank in status["ranks"]), "two samples")
    assert "35 %, 4 GB" in job.command_line("status").stdout
    job.release()
    assert job.wait_exit() == 0, job.told()


def test_a_rank_moves_from_a_gpu_that_failed_although_it_completed_steps_meanwhile(start, reference):
    job, happen = start("--hold", "6", CUDA_VISIBLE_DEVICES="0,GPU-1,2,3,4")
    job.wait_event("held")
    happen(0, XID, 13)  # a program's error
    happen(1, XID, 79)
    job.wait_stderr(line(1, "XID 79: it has fallen off the bus"))
    job.release()
    job.wait_state(1, 9)
    job.kill(1)
    job.check_repaired(reference("ddp-full", STEPS), [1])
    assert places(job, 1) == [1, 4]
    (event,) = [entry["event"] for entry in job.journal() if entry["event"]["type"] == "DeviceFailed"]
    assert (event["local_rank"], event["reason"]) == (1, "XID 79: it has fallen off the bus")


def test_an_ecc_error_and_a_gpu_that_is_gone_are_reported_once(start):
    job, happen = start("--hold", "6", CUDA_VISIBLE_DEVICES="0,1,2,3,4")
    job.wait_event("held")
    happen(3, GONE)
    job.wait_stderr(line(3, "it has fallen off the bus"))
    happen(3, XID, 79)
    happen(2, ECC)
    job.wait_stderr(line(2, "uncorrectable ECC error"))
    job.release()
    assert job.wait_exit() == 0, job.told()
    assert job.stderr.count("failed, and is avoided") == 2
