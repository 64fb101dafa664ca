"""The command after repairs: real processes, one at a time, with the incident in their environment."""

import asyncio
import os

import pytest
from msgspec.structs import replace

from deadpool_run.agent.observers import repair_command
from deadpool_run.agent.observers.repair_command import RepairCommand, incident_environment
from deadpool_run.agent.processes.children import Process
from deadpool_run.core.effects import Incident, Loss

LOSS = Loss(1, 1, "raised $(touch owned) \0`id`", injected=True, replacement=2, from_spare=True)
INCIDENT = Incident(2, (LOSS,), 30, 3, 0.05, 0.1, 0.01, 0.4, 0.45, 0.5, 0.6)
LIMIT_S = 30


class Parent:
    """A reaper like the agent's, with the number of ended children."""

    def __init__(self, wanted):
        self.expected, self.wanted = 0, wanted
        self.ended = asyncio.Event()

    def expect(self):
        self.expected += 1

    def unexpect(self):
        self.expected -= 1
        self._count()

    def adopt(self, pid, on_exit):
        self.expected -= 1

        def ended(end):
            on_exit(end)
            self._count()

        return Process(pid, ended)

    def _count(self):
        self.wanted -= 1
        if not self.wanted:
            self.ended.set()


def ran(tmp_path, *commands, incidents=1, outer=()):
    """Run each command for its number of incidents, and wait for all."""

    async def run():
        for command in commands:
            parent = Parent(min(incidents, 17))
            runner = RepairCommand(command, parent, {**os.environ, "DIR": str(tmp_path), **dict(outer)})
            for number in range(incidents):
                runner.run(incident_environment(replace(INCIDENT, epoch=number), "night", tmp_path))
            async with asyncio.timeout(LIMIT_S):
                await parent.ended.wait()
            assert parent.expected == 0
            runner.close()
            assert runner._sink.close(LIMIT_S)

    asyncio.run(run())


def test_a_command_gets_the_incident_in_its_environment_alone(tmp_path):
    script = 'env -0 > "$DIR/env"; echo "$@" > "$DIR/words"; ls -l /proc/self/fd > "$DIR/fds"'
    ran(tmp_path, ("sh", "-c", script, "sh", "one"), outer={"DEADPOOL_TOKEN": "secret"}.items())
    found = dict(each.split("=", 1) for each in (tmp_path / "env").read_text().split("\0") if each)
    assert {name: found[name] for name in found if name.startswith("DEADPOOL_INCIDENT") and "TEXT" not in name} == {
        "DEADPOOL_INCIDENT_ID": "0",
        "DEADPOOL_INCIDENT_RANKS": "1",
        "DEADPOOL_INCIDENT_INJECTED": "1",
        "DEADPOOL_INCIDENT_PLANNED": "0",
        "DEADPOOL_INCIDENT_SECONDS": "0.650",
        "DEADPOOL_INCIDENT_RESUMED_STEP": "30",
        "DEADPOOL_INCIDENT_STEPS_REPEATED": "3",
        "DEADPOOL_INCIDENT_CAUSES": "raised $(touch owned)  `id`",
        "DEADPOOL_INCIDENT_JSON": found["DEADPOOL_INCIDENT_JSON"],
    }
    assert "DEADPOOL_TOKEN" not in found
    assert (tmp_path / "words").read_text() == "one\n"
    assert not [line for line in (tmp_path / "fds").read_text().splitlines() if "socket" in line or "memfd" in line]
    assert not (tmp_path / "owned").exists()


def test_commands_run_one_at_a_time_and_some_wait(tmp_path, capfd):
    script = 'mkdir "$DIR/only" && echo "$DEADPOOL_INCIDENT_ID" >> "$DIR/order"; rmdir "$DIR/only"'
    ran(tmp_path, ("sh", "-c", script), incidents=20)
    assert (tmp_path / "order").read_text().split() == [str(number) for number in range(17)]
    assert capfd.readouterr().err.count("16 wait for it") == 3


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (("/etc/passwd",), "cannot be run: [Errno 13] Permission denied"),
        (("sh", "-c", "exit 3"), "ended with exit code 3"),
        (("sh", "-c", "kill -SEGV $$"), "was ended by SIGSEGV"),
    ],
)
def test_a_command_that_fails_is_a_line_and_the_next_one_runs(tmp_path, capfd, command, complaint):
    ran(tmp_path, command, incidents=2)
    lines = [line for line in capfd.readouterr().err.splitlines() if "--on-repair" in line]
    assert len(lines) == 2
    assert complaint in lines[0]


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(repair_command, "LIMIT_S", 0.3)
    ran(tmp_path, ("sh", "-c", 'sleep 600 & echo $! > "$DIR/pid"; wait'))
    assert "was ended by SIGKILL" in capfd.readouterr().err
