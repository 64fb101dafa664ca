"""From Slurm's variables to a place in the job, and from a batch script to what it asks for."""

import pytest

from deadpool_run.agent.slurm import batch_script
from deadpool_run.agent.slurm.discovery import ArrayTask, SlurmStep, discover
from deadpool_run.errors import UsageError

BATCH = {
    "ENVIRONMENT": "BATCH",
    "SLURMD_NODENAME": "n1",
    "SLURM_CPUS_ON_NODE": "16",
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TOPOLOGY_ADDR": "top.leaf0.n1",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}
STEP = BATCH | {
    "SLURMD_NODENAME": "n2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURM_SRUN_COMM_PORT": "37533",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_TOPOLOGY_ADDR": "top.leaf0.n2",
}
"""As Slurm 22.05 sets them."""


def test_outside_slurm_there_is_nothing():
    assert discover({"PATH": "/bin"}) is None
    assert discover({"SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": ""}) is None


def test_a_batch_script_is_in_an_allocation_only():
    place = discover(BATCH)
    assert place.step is None
    assert (place.nodes, place.name, place.batch) == (("n1", "n2", "n3"), "n1", True)
    assert place.options() == {}
    assert place.run_id == "slurm-42"


def test_a_task_of_a_step_knows_its_place():
    place = discover(STEP)
    assert place.step == SlurmStep(0, 1, 1, ("n1", "n2", "n3"), "10.0.0.1:37533")
    assert (place.name, place.failure_domain, place.gpus) == ("n2", "top.leaf0", 8)
    assert place.options() == {
        "nproc_per_node": "8",
        "run_id": "slurm-42.0",
        "nnodes": "3",
        "node_rank": "1",
        "node_name": "n2",
        "topology": "top.leaf0",
        "rdzv_endpoint": f"10.0.0.1:{place.port},n1:{place.port}",
    }


def test_all_tasks_of_a_step_agree_and_other_runs_do_not():
    here = discover(STEP)
    there = discover(STEP | {"SLURMD_NODENAME": "n3", "SLURM_NODEID": "2", "SLURM_PROCID": "2"})
    assert (there.run_id, there.endpoint, there.port) == (here.run_id, here.endpoint, here.port)
    others = [discover(STEP | {name: "1"}) for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_ID")]
    assert len({place.run_id for place in (here, *others)}) == 4
    assert len({place.port for place in (here, *others)}) == 4
    assert all(20_000 <= place.port < 32_000 for place in (here, *others))


def test_a_step_of_some_of_the_nodes():
    place = discover(STEP | {"SLURM_STEP_NODELIST": "n[2-3]", "SLURM_NODEID": "0"})
    assert place.options()["nnodes"] == "2"
    assert place.first_host == ("n2", "10.0.0.1"), "srun's machine is not of the step, though it may be a last resort"


def test_a_step_of_one_node_needs_nobody():
    place = discover(STEP | {"SLURM_STEP_NODELIST": "n2", "SLURM_NODEID": "0"})
    assert place.options() == {"nproc_per_node": "8", "run_id": "slurm-42.0", "nnodes": "1"}


def test_srun_from_a_login_node_does_not_run_on_the_first_node():
    from_login = {name: value for name, value in STEP.items() if name != "ENVIRONMENT"}
    assert discover(from_login).first_host == ("n1", "10.0.0.1")


def test_an_address_of_ipv6_is_written_in_brackets():
    assert discover(STEP | {"SLURM_LAUNCH_NODE_IPADDR": "fd00::1"}).endpoint.startswith("[fd00::1]:")


@pytest.mark.parametrize("special", ["4294967290", "4294967291", "4294967292", "4294967293"])
def test_the_shell_of_salloc_is_no_step_of_ours(special):
    assert discover(STEP | {"SLURM_STEP_ID": special}).step is None


def test_several_tasks_of_one_node_are_seen():
    place = discover(STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,8,1", "SLURM_LOCALID": "3"})
    assert place.step.tasks_here == 8


def test_a_job_array():
    array = {
        "SLURM_ARRAY_JOB_ID": "40",
        "SLURM_ARRAY_TASK_ID": "7",
        "SLURM_ARRAY_TASK_MIN": "1",
        "SLURM_ARRAY_TASK_STEP": "2",
        "SLURM_ARRAY_TASK_COUNT": "5",
    }
    assert discover(BATCH | array).array == ArrayTask("40", 5)
    assert discover(BATCH).array is None


def test_a_node_whose_name_has_dots_has_no_label_rather_than_a_wrong_one():
    assert discover(STEP | {"SLURM_TOPOLOGY_ADDR": "top.leaf0.n2.cluster"}).failure_domain == ""
    assert discover(STEP | {"SLURM_TOPOLOGY_ADDR": "n2", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}).failure_domain == ""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SLURM_JOB_NODELIST", "n[1-"),
        ("SLURM_STEP_NODELIST", "n[3-1]"),
        ("SLURM_STEP_TASKS_PER_NODE", "x"),
        ("SLURM_STEP_ID", "no"),
        ("SLURM_NODEID", "-1"),
        ("SLURM_NODEID", "3"),
        ("SLURM_GPUS_ON_NODE", "two"),
    ],
)
def test_what_slurm_would_not_write_is_refused_with_a_way_out(variable, value):
    with pytest.raises(UsageError, match="--no-slurm"):
        discover(STEP | {variable: value})


def test_a_variable_that_is_no_number_is_named_with_its_value():
    with pytest.raises(UsageError, match=r"^SLURM_STEP_ID is 'no', not a number\nunset it, or add --no-slurm$"):
        discover(STEP | {"SLURM_STEP_ID": "no"})


@pytest.mark.parametrize(
    ("line", "survives"),
    [
        ("#SBATCH --no-kill", True),
        ("#SBATCH -k", True),
        ("#SBATCH -sk -N4", True),
        ("#SBATCH --nodes=4 --no-kill --signal=USR1@180  # to outlive a node", True),
        ("#SBATCH --nodes=4", False),
        ("#SBATCH -Jk", False),
        ("#SBATCH --no-kill=off", False),
        ("#SBATCH --comment='--no-kill me'", False),
        ("# SBATCH --no-kill", False),
        ("echo\n#SBATCH --no-kill", False),
        ("# a comment\n\n#SBATCH --no-kill", True),
        ("#SBATCH --comment=it's --no-kill", True),
    ],
)
def test_whether_a_batch_script_survives_a_node(line, survives):
    assert batch_script.survives_node_loss(f"#!/bin/bash\n{line}\nsrun true\n") is survives
