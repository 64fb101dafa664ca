"""Jobs on a real Slurm that train to the end, whatever happens to their nodes; to the last bit what an unfailed run has."""

import json
import re
from pathlib import Path

import pytest

STEP = ("--least-ms", "100")
"""Copies go out beside the next step, and training does not wait for them: a shorter one could be lost with the one before."""
MINIMAL = Path(__file__).parents[2] / "recipes" / "minimal" / "train.py"
IN_FILES = ("--output=task-%a.out",)


def run_dir(lab, job):
    return lab.home / "shared" / "deadpool-run" / f"slurm-{job.number}"


def outputs(lab):
    return "\n".join(path.read_text() for path in sorted(lab.work.glob("task-*.out")))


def status(lab, *words):
    return json.loads(lab.run("deadpool-run", "status", "--json", *words).stdout)


def check_end(training, reference, lost=(), ranks=3):
    training.account.check_same_as(reference)
    training.account.check_ranks(lost, ranks)
    assert training.account.steps_repeated() <= 1


def test_one_line_trains_on_all_nodes_and_is_seen_from_everywhere(training, reference, lab):
    run = training("job", hold=5)
    run.wait_held()
    where = run_dir(lab, run.job)
    assert run.node_of(0) == "n1", "ranks follow Slurm's order"
    seen = status(lab, "--run-dir", str(where))
    assert (seen["run"]["run_id"], len(seen["ranks"]), seen["run"]["slurm_job"]) == (
        f"slurm-{run.job.number}",
        3,
        str(run.job.number),
    )
    assert seen["run"]["leader"] is True
    assert owners(status(lab, "--run-dir", str(where / "node-n3"))) == owners(seen), "as asked of another node"
    assert owners(status(lab, "--slurm-job", str(run.job.number))) == owners(seen), "as asked of a login node"
    run.release()
    assert run.job.wait() == "COMPLETED", run.job.output()
    check_end(run, reference())
    record = json.loads((where / "node-n2" / "run.json").read_text())
    assert (record["leader"], record["exit_code"]) == (False, 0)


def owners(seen):
    """Return who holds each rank, and where: the leader hears of the rest a heartbeat later."""
    return [(rank["rank"], rank["worker"], rank["pid"], rank["node"]) for rank in seen["ranks"]]


def test_agents_that_the_user_starts_agree_on_a_token(shared_lab):
    srun = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1"
    script = f"#!/bin/bash\n#SBATCH --no-kill --nodes=3\n{srun} deadpool-run --no-config --spares 1 {MINIMAL} 20\n"
    job = shared_lab.sbatch(script)
    assert job.wait() == "COMPLETED", job.output()
    assert f"joined run slurm-{job.number}.0 as node n2" in job.output()
    sums = re.findall("rank ([01]): the weights sum to (.*) after 20 steps", job.output())
    assert sorted(rank for rank, _ in sums) == ["0", "1"]
    assert len({total for _, total in sums}) == 1


def test_a_node_that_is_lost_is_replaced(training, reference, lab):
    run = training("job", *STEP)
    run.wait_version(5)
    lost = next(rank for rank in range(3) if run.node_of(rank) != "n1")
    lab.lose_node(run.node_of(lost))
    assert run.job.wait() == "COMPLETED", run.job.output()
    assert run.job.exit_code == 0
    check_end(run, reference(), [lost])


def test_when_the_batch_host_dies_training_ends_well_and_so_does_the_job(training, reference, lab):
    run = training("job", *STEP)
    run.wait_version(5)
    assert run.node_of(0) == "n1"
    lab.kill_node("n1")
    assert run.job.wait("CANCELLED", "COMPLETING")
    check_end(run, reference(), [0])
    where = json.loads((run_dir(lab, run.job) / "leader.json").read_text())
    assert (where["term"], where["node"] != "n1") == (1, True)
    record = json.loads((run_dir(lab, run.job) / f"node-{where['node']}" / "run.json").read_text())
    assert (record["exit_code"], record["leader"], record["term"]) == (0, True, 1)


def test_without_a_majority_and_without_the_batch_host_who_is_left_ends_the_job(training, lab):
    """Of two nodes the first falls silent, so that the other may not go on alone, and then is gone for good."""
    run = training("job", options=("--nodes=2", "--nodelist=n1,n2"), hold=5)
    run.wait_held()
    lab.freeze_node("n1")
    record = run_dir(lab, run.job) / "node-n2" / "run.json"
    lab.wait_until(lambda: "no leader was heard of" in record.read_text(), "end of the second node's workers")
    assert run.job.state == "RUNNING"
    lab.kill_node("n1")
    assert run.job.wait("CANCELLED", "COMPLETING")


def test_before_the_limit_a_job_over_nodes_saves_and_goes_on_when_it_is_queued_again(training, reference, lab):
    run = training("limit", hold=8)
    run.wait_held()
    run.job.signal_batch("USR1")
    run.job.wait_output("step 8 is durable")
    run.job.wait("PENDING")
    for node in lab.nodes:
        run.job.wait_gone(node)
    run.release()
    run.job.hurry()
    assert run.job.wait() == "COMPLETED", run.job.output()
    assert (run.job.exit_code, run.job.field("Restarts")) == (0, "1")
    assert "resuming at step 8, from" in run.job.output()
    run.account.check_same_as(reference())
    assert [len(run.account.pids(rank)) for rank in range(3)] == [2, 2, 2]
    assert run.account.steps_repeated() == 0
    records = sorted((lab.home / "shared" / "deadpool-run").glob(f"slurm-{run.job.number}*/run.json"))
    assert [json.loads(record.read_text())["exit_code"] for record in records] == [75, 0]


def test_before_the_limit_a_task_of_a_sweep_saves_and_goes_on_when_it_is_queued_again(training, reference, lab):
    run = training("sweep", options=("--array=0", "--nodelist=n1", *IN_FILES), ranks=2, hold=8)
    run.wait_held()
    run.job.signal_batch("USR1")
    lab.wait_until(lambda: "step 8 is durable" in outputs(lab), "checkpoint")
    run.job.wait("PENDING")
    run.job.wait_gone("n1")
    run.release()  # the one that comes next, which holds there as well
    run.job.hurry()
    assert run.job.wait() == "COMPLETED", outputs(lab)
    resumed = int(re.search("resuming at step ([0-9]+)", outputs(lab))[1])
    assert resumed >= 8
    run.account.check_same_as(reference(2))
    assert len(run.account.pids(0)) == 2


def task_on(lab, node):
    """Return the task of an array that runs on a node, as Slurm names it."""
    return lab.run("squeue", "-h", "-w", node, "-o", "%i").stdout.strip()


def queued_again(run, task):
    """Have a task that lost its node, and that Slurm has queued again, begin soon, on the fifth node."""
    lab = run.job.lab
    lab.wait_until(lambda: "PENDING" in lab.run("scontrol", "show", "job", task).stdout, f"{task} in the queue again")
    run.job.hurry(task)


@pytest.mark.parametrize("lab", [5], indirect=True)
def test_a_task_of_an_array_that_lost_its_node_comes_back_as_a_spare(training, reference, lab):
    run = training("array", *STEP, options=IN_FILES, hold=20)
    run.wait_version(5)
    leader = json.loads((run_dir(lab, run.job) / "leader.json").read_text())["node"]
    lost = next(rank for rank in (1, 2) if run.node_of(rank) != leader)
    node = run.node_of(lost)
    number = task_on(lab, node)
    lab.lose_node(node)
    run.wait_held()
    queued_again(run, number)
    lab.wait_until(lambda: outputs(lab).count("joined run") == 4, "the task that came back")
    run.release()
    lab.wait_until(lambda: not lab.run("squeue", "-h").stdout, "end of all tasks")
    check_end(run, reference(), [lost])


@pytest.mark.parametrize("lab", [5], indirect=True)
def test_an_array_whose_leading_task_is_lost_goes_on_and_a_late_one_is_told_of_the_end(training, reference, lab):
    run = training("array", *STEP, options=IN_FILES)
    run.wait_version(5)
    node = json.loads((run_dir(lab, run.job) / "leader.json").read_text())["node"]
    lost = [rank for rank in range(3) if run.node_of(rank) == node]
    number = task_on(lab, node)
    lab.lose_node(node)
    lab.wait_until(lambda: len(run.account.of("end")) == 3, "end of the training")
    queued_again(run, number)
    lab.wait_until(lambda: not lab.run("squeue", "-h").stdout, "end of all tasks")
    check_end(run, reference(), lost)
    assert "this run is over: every rank finished" in outputs(lab)
