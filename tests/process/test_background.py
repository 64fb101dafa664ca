"""Background processes of a worker that ended in order get SIGTERM and a grace period."""

import os
import re
import select

import pytest

NEAR = (
    "sh -c 'trap \"echo near >$NEWS; exit\" TERM; echo up >$UP; while :; do read word <$NEVER; done' & read word <$UP"
)
FAR = NEAR.replace("near", "far").replace("sh -c", "setsid sh -c", 1)
DEAF = NEAR.replace("echo near >$NEWS; exit", "")


@pytest.fixture
def left_by(cluster, tmp_path):
    """Run a job whose only rank starts these and then ends so. Return what they told, and the agent's lines about them."""
    fifos = {name: tmp_path / name for name in ("NEWS", "UP", "NEVER")}
    for path in fifos.values():
        os.mkfifo(path)
    fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in fifos.values()]

    def run(*background, end, code, grace="30"):
        script = tmp_path / "script.sh"
        script.write_text("\n".join((*background, end)))
        env = {name: str(path) for name, path in fifos.items()}
        options = ("--no-python", "--shutdown-timeout", grace)
        job = cluster(str(script), script="/bin/sh", nproc=1, spares=0, options=options, env=env)
        assert job.wait_exit() == code, job.told()
        job.check_nothing_left()
        told = set(os.read(fds[0], 1000).split()) if select.select(fds[:1], [], [], 0)[0] else set()
        return told, [line for line in job.stderr.splitlines() if "(--shutdown-timeout)" in line]

    yield run
    for fd in fds:
        os.close(fd)


def test_after_success_they_are_asked_to_end(left_by):
    assert left_by(NEAR, FAR, end="exit 0", code=0)[0] == {b"near", b"far"}


def test_one_that_does_not_end_is_killed_after_the_grace(left_by):
    told, (line,) = left_by(DEAF, FAR, end="exit 0", code=0, grace="2")
    assert told == {b"far"}
    assert re.search(
        r"waiting up to \d s \(--shutdown-timeout\) for processes of workers that SIGTERM did not end: \d+ \(sh\)",
        line,
    )


def test_after_a_failure_the_group_is_killed_at_once(left_by):
    """A replacement would need its devices."""
    assert left_by(NEAR, FAR, end="exit 3", code=1)[0] == {b"far"}
