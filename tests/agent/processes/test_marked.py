"""Processes that are found by the job's mark alone."""

import subprocess
import uuid

import pytest

from deadpool_run.agent.processes import marked

LOOKS = 300


@pytest.fixture
def mark():
    return f"DEADPOOL_MARK={uuid.uuid4().hex}".encode()


@pytest.fixture
def restless(tmp_path, mark):
    """A process that begins a program all the time. While one begins, the kernel shows no environment."""
    script = tmp_path / "again"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o700)
    process = subprocess.Popen([script], env=dict([mark.decode().split("=")]))
    yield process
    process.kill()
    process.wait()


def test_a_process_that_begins_a_program_is_not_overlooked(restless, mark):
    """Either it is found, or it is known that not all were asked."""
    looks = [marked.look(mark) for _ in range(LOOKS)]
    assert not [look for look in looks if look == (set(), True)]
    assert ({restless.pid}, True) in looks


def test_a_process_that_begins_a_program_is_ended(restless, mark):
    marked.end(mark)
    restless.wait(10)
    assert marked.have_ended(mark)


def test_others_are_not_ended(mark):
    """Kernel threads, processes that were not reaped, and those with an empty environment are no reason to look again."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={}) as other, subprocess.Popen(["true"]) as ended:
        marked.end(mark)
        assert marked.look(mark) == (set(), True)
        assert other.poll() is None
        other.communicate()
        ended.wait()
