"""The words that a shell offers."""

import json

import pytest
from test_cli_app import deadpool, ours
from typer.main import get_command

from deadpool_run.cli.app import app, main


def variables(line):
    """Return the variables with which bash asks for the last word of a line."""
    return {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_DEADPOOL_RUN_COMPLETE": "complete_bash"}


@pytest.fixture
def offered(tmp_path, monkeypatch, capsys):
    """Returns the words that are offered for the last one of a line."""

    def ask(line):
        for name, value in ours(tmp_path, **variables(line)).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out.split()

    return ask


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stat", ["status"]),
        ("kill", ["kill-rank"]),
        ("", [name for name in get_command(app).commands if name != "run"]),
        ("nosuch", []),
        ("--npro", ["--nproc-per-node"]),
        ("--spare", ["--spares", "--spare-mode"]),
        ("--vers", ["--version"]),
        ("--help", ["--help", "--help-all"]),
        ("--nproc-per-node 4 --spare", ["--spares", "--spare-mode"]),
        ("--spares 1 st", []),
        ("--spare-mode ", ["warm", "hot"]),
        ("--numa-binding ", ["node", "socket", "exclusive", "core-complex"]),
        ("--resume ", ["auto", "never"]),
        ("--color=a", ["auto", "always"]),
        ("--durable ", []),
        ("--print-completion ba", ["bash"]),
        ("config ", ["show"]),
        ("help dr", ["drain"]),
        ("help config ", ["show"]),
        ("check --spare-mode h", ["hot"]),
        ("check --faults ", ["all"]),
        ("kill-rank --how sigs", ["sigsegv", "sigstop"]),
        ("kill-rank --phase ab", ["aborted"]),
        ("logs --stream ", ["out", "err", "both"]),
    ],
)
def test_words_are_completed(offered, line, words):
    assert offered(f"deadpool-run {line}") == words


def test_names_of_runs_are_completed_without_torch(tmp_path, offered):
    for name in ("night", "noon"):
        (tmp_path / "state" / "deadpool-run" / name).mkdir(parents=True)
        record = {"run_id": name, "started": "2026-03-01T09:15:00Z", "ended": "2026-03-01T09:16:00Z"}
        (tmp_path / "state" / "deadpool-run" / name / "run.json").write_text(json.dumps(record))
    assert sorted(offered("deadpool-run status --run-id n")) == ["night", "noon"]
    done = deadpool(env=ours(tmp_path, **variables("deadpool-run report ni")), python=("-X", "importtime"))
    assert done.stdout.split() == ["night"]
    imported = {each.rpartition("|")[2].strip() for each in done.stderr.splitlines()}
    assert "typer" in imported
    assert "torch" not in imported
