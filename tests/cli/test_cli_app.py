"""The command as users meet it: a process, its streams and its exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_run.cli.commands.launch import EXAMPLES
from deadpool_run.cli.launch.script import COMMANDS, misplaced
from deadpool_run.cli.options.table import OPTIONS

WAIT_S = 60
ALL = ("", *COMMANDS)


def deadpool(*args, cwd=None, env=None, python=()):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DEADPOOL_", "PET_"))}
    environment |= {"COLUMNS": "100", "NO_COLOR": "1"} | (env or {})
    return subprocess.run(
        [sys.executable, *python, "-m", "deadpool_run", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=cwd,
        env=environment,
        check=False,
    )


@pytest.fixture
def home(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    return tmp_path


def ours(home, **env):
    return {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config"), **env}


@pytest.mark.parametrize("command", ALL)
def test_help_is_there_and_imports_no_torch(command):
    done = deadpool(*command.split(), "--help", python=("-X", "importtime"))
    assert done.returncode == 0
    assert f"Usage: deadpool-run {command}".strip() in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in imported, "the trace of imports was not read"
    assert not {name for name in imported if name.partition(".")[0] in {"torch", "numpy"}}


@pytest.mark.parametrize(
    ("line", "same_as"),
    [("help", "--help"), ("help kill-rank", "kill-rank --help"), ("help config show", "config show --help")],
)
def test_help_is_a_command_too(line, same_as):
    done = deadpool(*line.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout == deadpool(*same_as.split()).stdout


def test_commands_that_do_something_import_no_torch(home):
    for line in (
        "status",
        "ls",
        "logs",
        "events",
        "report",
        "stack",
        "stop",
        "wait",
        "prune",
        "doctor --no-swap",
        "kill-rank 0",
        "drain 0",
        "config show",
        "env",
        "--dry-run train.py",
        "--version",
    ):
        done = deadpool(*line.split(), cwd=home, env=ours(home), python=("-X", "importtime"))
        imported = {each.rpartition("|")[2].strip() for each in done.stderr.splitlines()}
        assert done.returncode in {0, 4}, done.stderr
        assert "typer" in imported
        assert "torch" not in imported, line


def test_the_forkserver_is_started_before_the_rest_of_the_agent_is_imported():
    """Importing the agent takes as long as a tenth of importing torch, which can go on meanwhile."""
    trace = "import deadpool_run.cli.app, deadpool_run.agent.start, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", trace], check=True, capture_output=True, text=True)
    imported = set(done.stdout.split())
    assert "deadpool_run.agent.processes.forkserver_process" in imported
    assert not imported & {"asyncio", "rich", "deadpool_run.agent.agent", "deadpool_run.core.events"}


def test_help_names_every_option_and_the_examples():
    said = deadpool("--help-all").stdout
    words = " ".join(said.split())
    for option in OPTIONS:
        assert f" {option.flag} " in words
        assert option.help in words
    for example in EXAMPLES:
        assert example in said


@pytest.mark.parametrize("columns", [80, 200])
def test_help_has_the_most_used_options_and_fits_the_terminal(columns):
    said = deadpool("--help", env={"COLUMNS": str(columns)}).stdout
    shown = {option.name for option in OPTIONS if re.search(rf"^  (-., )?{option.flag}( |$)", said, re.MULTILINE)}
    assert shown == {option.name for option in OPTIONS if option.common}
    assert len(shown) == 15
    assert max(map(len, said.splitlines())) < min(columns, 100)
    for word in ("--help-all", "--version", "kill-rank", "prune"):
        assert word in said
    assert len(said.splitlines()) < 100


@pytest.mark.parametrize(
    ("line", "first", "last"),
    [
        ("", "no script to run", "--help lists the options"),
        ("--bogus train.py", "no such option: --bogus", "deadpool-run --help"),
        ("--nprocs 2 train.py", "no such option: --nprocs", "did you mean --nproc-per-node?"),
        ("--spare 1 train.py", "--spare is ambiguous: it may be --spares or --spare-mode", "in full"),
        ("--nproc-per-node", "requires an argument", "deadpool-run --help"),
        ("--nproc-per-node four train.py", "--nproc-per-node 'four'", "write the number of ranks"),
        ("--nnodes 2 train.py", "--nnodes asks for several machines", "--rdzv-endpoint HOST:PORT"),
        ("--nnodes 2:4 train.py", "--nnodes '2:4'", "--nnodes 4 --spares 2n"),
        ("statsu", "script 'statsu': no such file", "`deadpool-run status`"),
        ("help kill", "'kill': no such command", "`deadpool-run help kill-rank`"),
        ("help train.py", "'train.py': no such command", "the commands are check, "),
        ("hlep", "script 'hlep': no such file", "`deadpool-run help`"),
        ("list", "script 'list': no such file", "`deadpool-run ls`"),
        ("nonsense", "script 'nonsense': no such file", "the commands are check, "),
        ("trian.py", "script 'trian.py': no such file", "did you mean train.py?"),
        ("python train.py", "'python' is not a script", "leave it out: `deadpool-run [OPTIONS] SCRIPT"),
        (f"{sys.executable} train.py", "is not a script", "leave it out: "),
        ("/bin/sh train.sh", "script '/bin/sh': a program, not Python", "add --no-python"),
        (".", "script '.': a folder without __main__.py", "name the script in it"),
        ("-m nosuch.mod", "module 'nosuch.mod': there is no package or module 'nosuch'", "PYTHONPATH"),
        ("-m train.py", "module 'train.py': the file of a script", "leave out -m"),
        ("--no-python nowhere-to-be-found", "program 'nowhere-to-be-found'", "--no-python"),
        ("--config nowhere.yaml train.py", "nowhere.yaml: cannot be read", "--no-config"),
        ("--color blue train.py", "--color 'blue'", "write one of auto, always, never"),
        ("kill-rank", "name exactly one of RANK, --random, --node, --spare and --agent; it got none", "kill-rank 1"),
        ("kill-rank 1 --how politely", "politely", "write one of sigkill"),
    ],
)
def test_a_wrong_line_is_refused_on_stderr_alone_with_code_2(home, line, first, last):
    done = deadpool(*line.split(), cwd=home, env=ours(home))
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert done.stdout == ""
    assert first in lines[0]
    assert lines[0].startswith("deadpool-run: ")
    assert last in lines[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["status", "kill-rank 0", "status --json"])
def test_without_a_live_run_there_is_code_4(home, line):
    done = deadpool(*line.split(), cwd=home, env=ours(home))
    assert (done.returncode, done.stdout) == (4, "")
    assert "no live run below" in done.stderr


def test_a_dry_run_shows_values_sources_map_and_environment_and_starts_nothing(home):
    (home / "deadpool.yaml").write_text("spares: 2\nshutdown-timeout: 5\n")
    line = "--nproc_per_node=2 --rdzv-backend c10d --dry-run train.py -- --lr 3 --dry-run"
    done = deadpool(*line.split(), cwd=home, env=ours(home, PET_ROLE="trainer", DEADPOOL_SHUTDOWN_TIMEOUT="6"))
    assert (done.returncode, done.stderr) == (0, "")
    words = [each.split() for each in done.stdout.splitlines()]
    assert ["nproc-per-node", "2", "--nproc-per-node"] in words
    assert ["spares", "2", "deadpool.yaml"] in words
    assert ["shutdown-timeout", "6", "DEADPOOL_SHUTDOWN_TIMEOUT"] in words
    assert ["role", "trainer", "PET_ROLE"] in words
    assert not [each for each in words if each[-1:] == ["default"]]
    assert "rank 1     local rank 1" in done.stdout
    assert "spare 1    for any rank" in done.stdout
    assert "train.py --lr 3 --dry-run  (forked from the fork server)" in done.stdout
    assert "no effect on one machine: --rdzv-backend" in done.stdout
    for variable in ("WORLD_SIZE=2", "LOCAL_RANK=0", "ROLE_NAME=trainer", "MASTER_PORT=<a free port>"):
        assert ["".join(variable.split())] in [["".join(each.split())] for each in done.stdout.splitlines()]
    assert not (home / "state").exists()


def test_options_and_variables_that_nothing_reads_are_noted(home):
    line = "--dry-run train.py --spares 1 --lr 3 --config x --spares=2"
    done = deadpool(*line.split(), cwd=home, env=ours(home, DEADPOOL_SPAERS="1", DEADPOOL_TEST_X="1"))
    notes = done.stdout.partition("notes\n")[2].partition("run\n")[0].splitlines()
    assert [note.strip() for note in notes] == [
        "--spares: passed to train.py, because it comes after the script; options of deadpool-run come before it",
        "DEADPOOL_SPAERS has no effect: no option reads it: did you mean DEADPOOL_SPARES?",
    ]
    inside = deadpool(*line.split(), cwd=home, env=ours(home, DEADPOOL_SPAERS="1", DEADPOOL_WORKER="0"))
    assert "DEADPOOL_SPAERS" not in inside.stdout


def test_only_options_that_scripts_have_too_go_to_them_without_a_note():
    after = [f"--{name}" for name in ("chaos", "replicas", "preload", "on-repair", "metrics_port=9400", "tee")]
    scripts = ["--verbose", "--config", "--resume", "--log-dir", "--run-id", "--master_port", "--seed", "--lr"]
    (note,) = misplaced(["train.py", *after, *scripts])
    assert note.startswith("--chaos, --replicas, --preload, --on-repair, --metrics_port, --tee: passed to train.py")
    assert not list(misplaced(["train.py", *scripts]))


def test_a_dry_run_for_several_machines_shows_who_is_what_and_makes_no_secret(home):
    line = "--nproc-per-node 2 --nnodes 4 --spares 1 --rdzv-endpoint h:1 --dry-run train.py"
    done = deadpool(*line.split(), cwd=home, env=ours(home))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [each.strip() for each in done.stdout.splitlines()]
    assert "6 ranks, 2 on each of 3 nodes; spares: 1 node" in lines
    assert "node 1  ranks 2-3; copies of rank 2 on node 3; copies of rank 3 on node 0" in lines
    assert "node 3  spare" in lines
    assert "MASTER_ADDR=<the first node's address>" in lines
    fewer = deadpool("--simulate-nodes", "2", *line.split(), cwd=home, env=ours(home))
    assert "  waiting for 1 more node: the world starts with 3\n" in fewer.stdout
    assert not (home / "state").exists()
    assert deadpool("--simulate-nodes", "0", *line.split(), cwd=home, env=ours(home)).returncode == 2


def test_a_dry_run_says_whether_snapshots_fit_into_memory(home):
    line = "--nproc-per-node 2 --simulate-parameters 1M --dry-run train.py"
    done = deadpool("--snapshot-memory", "24MB", *line.split(), cwd=home, env=ours(home))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [each.strip() for each in done.stdout.splitlines()]
    assert "this machine  4 GiB: 4 for snapshots of 2 ranks" in lines
    assert "this machine may spend 24 MB: --snapshot-memory" in lines
    assert (
        "whole on each rank (DDP): 12 MB per rank, so up to 48 MB per machine: does not fit: 24 MB are missing" in lines
    )
    assert "sharded over all ranks (FSDP): 6 MB per rank, so up to 24 MB per machine: fits" in lines
    assert deadpool("--snapshot-memory", "24", "--dry-run", "train.py", cwd=home, env=ours(home)).returncode == 2


def test_config_show_names_the_source_of_each_value(home):
    (home / "config" / "deadpool").mkdir(parents=True)
    (home / "config" / "deadpool" / "config.yaml").write_text("preload: [numpy, my.models]\n")
    done = deadpool("config", "show", cwd=home, env=ours(home))
    words = [each.split() for each in done.stdout.splitlines()]
    assert ["preload", "numpy,my.models", str(home / "config" / "deadpool" / "config.yaml")] in words
    without = deadpool("config", "show", "--no-config", cwd=home, env=ours(home)).stdout
    assert ["preload", "-", "default"] in [each.split() for each in without.splitlines()]


def test_a_local_file_hides_the_users(home):
    (home / "config" / "deadpool").mkdir(parents=True)
    (home / "config" / "deadpool" / "config.yaml").write_text("spares: 7\n")
    (home / "deadpool.yaml").write_text("role: local\n")
    words = [each.split() for each in deadpool("config", "show", cwd=home, env=ours(home)).stdout.splitlines()]
    assert ["role", "local", "deadpool.yaml"] in words
    assert ["spares", "0", "default"] in words


@pytest.mark.parametrize("content", ["- a\n- b\n", "spares: [\n", "spares: 1\nspaers: 2\n", "\xff\xfe"])
def test_a_file_that_is_none_of_ours_is_refused_by_name(home, content):
    Path(home / "deadpool.yaml").write_bytes(content.encode("latin-1"))
    done = deadpool("--dry-run", "train.py", cwd=home, env=ours(home))
    assert done.returncode == 2
    assert "deadpool.yaml" in done.stderr.splitlines()[0]


def test_version():
    assert deadpool("--version").stdout.startswith("deadpool-run 0.")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_a_shell(shell):
    done = deadpool("--print-completion", shell)
    assert done.returncode == 0
    assert "_DEADPOOL_RUN_COMPLETE=complete_" in done.stdout
    assert shell in done.stdout


def test_the_completion_of_an_unknown_shell_is_refused():
    done = deadpool("--print-completion", "tcsh")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'bash', 'zsh'" in done.stderr


def test_env_tells_what_a_bug_report_needs(home):
    said = deadpool("env", env=ours(home, NCCL_DEBUG="INFO", SECRET_TOKEN="hunter2")).stdout
    for word in ("torch", "python", "CPUs", "GPUs", "NCCL_DEBUG=INFO"):
        assert word in said
    assert "hunter2" not in said


def test_a_script_with_a_commands_name_is_reached_by_a_path_or_dashes(home):
    (home / "status").write_text("")
    for line in ("--dry-run ./status", "--dry-run -- status"):
        assert deadpool(*line.split(), cwd=home, env=ours(home)).returncode == 0


def test_env_prints_no_secret(home):
    variables = {"DEADPOOL_TOKEN": "open sesame", "NCCL_DEBUG": "INFO", "SLURM_JOB_SECRET_FILE": "open sesame"}
    variables["DEADPOOL_DURABLE"] = "ftp://me:sesame@host/run"
    printed = deadpool("env", env=ours(home, **variables)).stdout
    assert "DEADPOOL_TOKEN=<set>" in printed
    assert "NCCL_DEBUG=INFO" in printed
    assert "DEADPOOL_DURABLE=ftp://me:***@host/run" in printed
    assert "sesame" not in printed
