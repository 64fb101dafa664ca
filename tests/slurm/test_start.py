"""In an allocation but outside a step: agents on every node, signals that reach them, and the job's own exit code."""

import json
import signal
from pathlib import Path

import pytest

from deadpool_run.agent.records.run_record import outcome
from deadpool_run.agent.slurm.discovery import discover
from deadpool_run.agent.spec import LaunchSpec, Mode, Target
from deadpool_run.cli.cluster import slurm_place
from deadpool_run.cli.cluster.slurm_start import agent_environment, own_command, start
from deadpool_run.cli.options.resolve import resolve
from deadpool_run.core.settings import Settings
from deadpool_run.errors import UsageError

FRONT = Path(__file__).parent / "scripts" / "front.py"
BATCH = {
    "ENVIRONMENT": "BATCH",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_GPUS_ON_NODE": "8",
}
SPEC = LaunchSpec(
    settings=Settings(world_size=1),
    target=Target(Mode.PATH, ("train.py",)),
    nproc_per_node=1,
    run_id="r",
    run_dir=Path("/runs/r"),
)
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2"}


def values(environment=BATCH, **given):
    first = resolve(given, environment, {})
    return resolve(given, environment, {}, "", slurm_place.detected(first, environment))


def nodes_to_start(environment=BATCH, **given):
    return slurm_place.nodes_to_start(values(environment, **given), discover(environment))


# --- who starts the agents -----------------------------------------------------------------------------------------


def test_a_batch_script_starts_agents_on_all_nodes():
    assert nodes_to_start() == 3
    assert values().text("nnodes") == "3"
    assert values()["nnodes"].source == "Slurm"
    assert nodes_to_start(nnodes="2") == 2
    assert nodes_to_start(nnodes="3:3") == 3


@pytest.mark.parametrize(
    "given",
    [{"standalone": True}, {"nnodes": "1"}, {"rdzv_endpoint": "n1:29500"}, {"node_rank": "0"}, {"no_slurm": True}],
)
def test_a_user_with_a_plan_of_their_own_is_let_alone(given):
    first = resolve(given, BATCH, {})
    assert slurm_place.nodes_to_start(first, slurm_place.find(first, BATCH)) == 0


def test_an_agent_and_a_worker_start_no_agents():
    assert nodes_to_start(STEP) == 0
    assert slurm_place.find(resolve({}, BATCH, {}), BATCH | {"DEADPOOL_WORKER": "3"}) is None


def test_one_node_is_started_only_from_elsewhere():
    alone = BATCH | {"SLURM_JOB_NODELIST": "n1"}
    assert nodes_to_start(alone) == 0
    at_login = {name: value for name, value in alone.items() if name not in {"SLURMD_NODENAME", "ENVIRONMENT"}}
    assert nodes_to_start(at_login) == 1


def test_more_nodes_than_there_are_are_refused():
    with pytest.raises(UsageError, match="job 42 has 3"):
        nodes_to_start(nnodes="4")
    with pytest.raises(UsageError, match="two different numbers"):
        nodes_to_start(nnodes="2:3")


def test_the_tasks_of_an_array_are_one_run_only_if_nnodes_says_so():
    task = BATCH | {
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_ARRAY_JOB_ID": "40",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_RESTART_COUNT": "1",
    }
    sweep = values(task)
    assert (sweep.text("run_id"), nodes_to_start(task)) == ("", 0)
    one = values(task, nnodes="4")
    assert (one.text("run_id"), nodes_to_start(task, nnodes="4")) == ("slurm-40", 0)
    assert not one["node_rank"].is_set
    assert one["node_rank"].source == "default"
    with pytest.raises(UsageError, match="job 42 has 1"):
        nodes_to_start(task, nnodes="5")


def test_several_tasks_of_one_node_are_refused_with_what_to_write():
    crowded = STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}
    with pytest.raises(UsageError, match="--ntasks-per-node=1"):
        values(crowded)
    assert values(crowded, standalone=True).text("nproc_per_node") == "8"


def test_what_the_user_says_is_stronger_than_what_slurm_says():
    assert values(STEP, nproc_per_node="2", run_id="mine").text("nproc_per_node") == "2"
    assert values(STEP, run_id="mine").text("run_id") == "mine"
    assert values(STEP).text("run_id") == "slurm-42.0"
    assert values(STEP | {"DEADPOOL_NPROC_PER_NODE": "4"}).text("nproc_per_node") == "4"


def test_the_folder_with_the_token_is_the_authority_of_this_step_alone(tmp_path):
    step = STEP | {"XDG_STATE_HOME": str(tmp_path)}
    folder = tmp_path / "deadpool-run" / "mine" / "meeting"
    assert values(step, run_id="mine").text("authority") == f"file:{folder / 'slurm-42.0'}"
    assert values(step | {"SLURM_STEP_ID": "1"}, run_id="mine").text("authority") == f"file:{folder / 'slurm-42.1'}"
    assert values(step, authority="agents").text("authority") == "agents"
    assert not values(step | {"DEADPOOL_TOKEN": "given"})["authority"].text
    assert not values(step, token_file="file")["authority"].text


def test_this_program_is_started_again_as_it_was(monkeypatch):
    monkeypatch.setattr("sys.executable", "/venv/bin/python")
    words = ["--spares", "1", "train.py", "-x"]
    assert own_command(["python", "/venv/bin/deadpool-run", *words], words) == [
        *("/venv/bin/python", "/venv/bin/deadpool-run"),
        *words,
    ]
    assert own_command(["python3", "-I", "-m", "deadpool_run", *words], words)[1:4] == ["-I", "-m", "deadpool_run"]


def test_the_environment_of_a_step_has_no_token():
    given = {"DEADPOOL_TOKEN": "x" * 16, "SLURM_NTASKS_PER_NODE": "2", "HOME": "/home/me"}
    expected = {"HOME": "/home/me", "DEADPOOL_RUN_ID": "r", "DEADPOOL_RUN_DIR": "/runs/r"}
    assert agent_environment(given, SPEC) == expected | {"DEADPOOL_TOKEN_FILE": "/dev/stdin"}
    file = {"DEADPOOL_TOKEN_FILE": "/home/me/token"}
    assert agent_environment(given | file, SPEC) == expected | file


def test_a_token_that_can_be_guessed_is_refused_before_srun_is_started():
    with pytest.raises(UsageError, match="DEADPOOL_TOKEN has 5 bytes"):
        start(discover(BATCH), 3, (), {"DEADPOOL_TOKEN": "short"}, SPEC)


# --- how it ended --------------------------------------------------------------------------------------------------


def record(folder: Path, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"ended": "2026-01-01T00:00:00", **fields}))


def test_the_record_with_the_largest_term_tells_the_end(tmp_path):
    assert outcome(tmp_path) is None
    record(tmp_path / "nodes" / "n1", exit_code=94, term=1)
    record(tmp_path / "nodes" / "n2", exit_code=0, term=2)
    record(tmp_path / "nodes" / "n3", exit_code=None, ended=None, term=3)
    (tmp_path / "nodes" / "n4").mkdir()
    (tmp_path / "nodes" / "n4" / "run.json").write_text("{")
    assert outcome(tmp_path) == 0


# --- with a real Slurm ---------------------------------------------------------------------------------------------


def told(lab, kind):
    path = lab.work / "told"
    lines = path.read_text().splitlines() if path.exists() else []
    return [fields for fields in map(json.loads, lines) if fields["kind"] == kind]


def submit(lab, *words, options=("--ntasks-per-node=2",), nodes=3):
    (lab.work / "told").unlink(missing_ok=True)
    lab.run("rm", "-rf", "shared")
    script = f"#!/bin/bash\n#SBATCH --no-kill --nodes={nodes}\nexec {lab.home}/bin/python {FRONT} {' '.join(words)}\n"
    return lab.sbatch(script, "--export=NONE", *options)


def test_every_node_gets_one_agent_with_a_token_and_the_jobs_code_is_returned(shared_lab):
    job = submit(shared_lab, "9", "75")
    assert job.wait() == "FAILED"
    assert job.exit_code == 75, "srun's own code is 9"
    agents = told(shared_lab, "up")
    assert sorted((agent["node"], agent["index"]) for agent in agents) == [("n1", 0), ("n2", 1), ("n3", 2)]
    assert {agent["run_id"] for agent in agents} == {f"slurm-{job.number}"}
    assert {tuple(agent["words"]) for agent in agents} == {("9", "75")}
    assert len({agent["endpoint"] for agent in agents}) == 1
    (token,) = {agent["token"] for agent in agents}
    assert len(token) == 64
    assert not any(token in agent["environment"] for agent in agents)


@pytest.mark.parametrize(
    "options",
    [("--gpus-per-node=2",), ("--gpus=6",), ("--gres=gpu:2",), ("--ntasks-per-node=2", "--gpus-per-task=1")],
    ids=lambda options: options[-1],
)
def test_an_agent_has_all_gpus_of_its_node(shared_lab, options):
    job = submit(shared_lab, "0", "0", options=options)
    assert job.wait() == "COMPLETED"
    assert [agent["gpus"] for agent in told(shared_lab, "up")] == [2, 2, 2]


def test_without_a_record_the_code_is_sruns(shared_lab):
    job = submit(shared_lab, "9", "-")
    job.wait()
    assert job.exit_code == 9
    assert "srun's exit code 9" in job.output()


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1"])
def test_a_signal_to_the_front_reaches_every_agent(shared_lab, name):
    job = submit(shared_lab, "0", "5", "wait")
    shared_lab.wait_until(lambda: len(told(shared_lab, "up")) == 3, "three agents")
    job.signal_batch(name)
    job.wait()
    assert sorted((each["node"], each["number"]) for each in told(shared_lab, "signal")) == [
        (node, getattr(signal, f"SIG{name}")) for node in ("n1", "n2", "n3")
    ]
    assert job.exit_code == 5


def test_a_cancelled_job_lets_agents_end_in_order(shared_lab):
    job = submit(shared_lab, "0", "5", "wait")
    shared_lab.wait_until(lambda: len(told(shared_lab, "up")) == 3, "three agents")
    job.cancel()
    assert job.wait() == "CANCELLED"
    shared_lab.wait_until(lambda: len(told(shared_lab, "signal")) == 3, "three signals")
    assert {each["number"] for each in told(shared_lab, "signal")} == {signal.SIGTERM}


def test_the_loss_of_a_node_leaves_the_others_and_the_code_alone(lab):
    job = submit(lab, "0", "0", "wait")
    lab.wait_until(lambda: len(told(lab, "up")) == 3, "three agents")
    lab.lose_node("n2")
    job.wait_output("Node failure on n2")
    job.signal_batch("USR1")
    assert job.wait() == "COMPLETED"
    assert sorted(each["node"] for each in told(lab, "signal")) == ["n1", "n3"]
