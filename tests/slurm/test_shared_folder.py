"""Agents that know nothing of each other agree on a token and on a leader."""

import os
import subprocess
import sys

import pytest

from deadpool_run.agent.cluster.shared_folder import LeaderRecord, SharedFolder
from deadpool_run.errors import UsageError

RACE = """
import sys
from pathlib import Path
from deadpool_run.agent.cluster.shared_folder import LeaderRecord, SharedFolder
folder = SharedFolder(Path(sys.argv[1]))
sys.stdin.read()
print(folder.token(), folder.claim(LeaderRecord(1, "10.0.0.1", int(sys.argv[2]))), folder.leader().port)
"""


def test_of_many_one_is_the_leader_and_all_know_who(tmp_path):
    folder = tmp_path / "state" / "run"
    SharedFolder(folder)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(folder), str(5000 + number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(6)
    ]
    for racer in racers:
        racer.stdin.close()
    told = [racer.stdout.read().split() for racer in racers]
    for racer in racers:
        racer.stdout.close()
        assert racer.wait(20) == 0
    assert len({token for token, _, _ in told}) == 1
    assert [won for _, won, _ in told].count("True") == 1
    (winner,) = (5000 + number for number, (_, won, _) in enumerate(told) if won == "True")
    assert {int(port) for _, _, port in told} == {winner}
    assert sorted(path.name for path in folder.iterdir()) == ["leader.1", "token"]


def test_the_largest_term_counts_and_is_had_once(tmp_path):
    folder = SharedFolder(tmp_path / "run")
    assert folder.leader() is None
    assert folder.claim(LeaderRecord(2, "fd00::1", 1))
    assert folder.claim(LeaderRecord(10, "10.0.0.2", 2))
    assert not folder.claim(LeaderRecord(3, "10.0.0.3", 3)), "too late"
    assert not folder.claim(LeaderRecord(10, "10.0.0.4", 4))
    assert folder.leader() == LeaderRecord(10, "10.0.0.2", 2)


def test_nobody_else_can_read_the_token(tmp_path):
    folder = SharedFolder(tmp_path / "run")
    before = os.umask(0)
    try:
        folder.token()
    finally:
        os.umask(before)
    assert (tmp_path / "run" / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(UsageError, match="others may enter it"):
        SharedFolder(tmp_path / "run")


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="XDG_STATE_HOME"):
        SharedFolder(tmp_path / "file" / "run")
