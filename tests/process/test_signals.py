"""Workers handle the signals that the agent passes on, however the agent was started."""

import os
import pty
import signal
import sys

import pytest
from kit.processes import marked


def test_a_background_job_of_a_shell_is_ended_by_sigint(cluster):
    """The shell has it ignored, and dispositions are inherited."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        job = cluster("--steps", "40", "--hold", "5", nproc=2, spares=1)
    finally:
        signal.signal(signal.SIGINT, before)
    job.wait_event("held")
    job.signal_agent(signal.SIGINT)
    assert job.wait_exit(20) == 1
    job.check_nothing_left()


@pytest.mark.parametrize("nohup", [True, False])
def test_the_end_of_a_terminal_ends_a_job_unless_it_runs_under_nohup(tmp_path, nohup):
    """The terminal is a real one. Its end sends SIGHUP, and writing to it fails from then on."""
    news = os.open(fifo(tmp_path / "news"), os.O_RDWR | os.O_CLOEXEC)
    release = os.open(fifo(tmp_path / "release"), os.O_RDWR | os.O_CLOEXEC)
    script = f"echo up > {tmp_path}/news; read word < {tmp_path}/release; echo over > {tmp_path}/news"
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(
            signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL
        )  # the tests may run under nohup themselves
        words = (
            "-m",
            "deadpool_run",
            "--no-config",
            "--run-dir",
            str(tmp_path / "run"),
            "--no-python",
            "/bin/sh",
            "-c",
        )
        os.execv(sys.executable, [sys.executable, *words, script])
    assert os.read(news, 100) == b"up\n"
    os.close(terminal)
    if nohup:
        os.write(release, b"go\n")
        assert os.read(news, 100) == b"over\n"
    _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == (0 if nohup else 1)
    for fd in (news, release):
        os.close(fd)


def fifo(path):
    os.mkfifo(path)
    return path


def test_a_job_goes_on_when_its_end_is_preemption_notice(cluster):
    """Slurm's `--signal=USR1@SECONDS` reaches every process of a step; by default it would end them."""
    job = cluster("--steps", "12", "--hold", "5", nproc=2, spares=1)
    job.wait_event("held")
    for pid in marked(job.mark):
        os.kill(pid, signal.SIGUSR1)
    job.wait_stderr("SIGUSR1: the job will be ended soon")
    job.release()
    assert job.wait_exit() == 0
    assert len({event["pid"] for event in job.account.of("start")}) == 2
    job.check_nothing_left()


@pytest.mark.slow
def test_a_signal_to_every_process_at_once_leaves_workers_the_time_to_end(cluster):
    """As Slurm signals a step: the fork server and the store get it too, and are needed to the end."""
    job = cluster(script="ending.py", nproc=2, spares=0)
    for rank in range(2):
        job.wait_event("up", rank=rank)
    workers = {event["pid"] for event in job.events}
    others = marked(job.mark).keys() - workers - {job.pid}
    assert len(others) == 2
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
        for pid in {*others, *(workers | {job.pid} if number is signal.SIGTERM else ())}:
            os.kill(pid, number)
    for rank in range(2):
        job.wait_event("ending", rank=rank)
    assert others <= marked(job.mark).keys()
    job.release()
    job.release()
    for rank in range(2):
        job.wait_event("ended", rank=rank)
    assert job.wait_exit(20) == 1
    job.check_nothing_left()
