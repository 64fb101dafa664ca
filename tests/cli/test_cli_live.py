"""The commands on a real job."""

from deadpool_run.errors import UsageError


def test_a_live_job_is_seen_and_a_killed_rank_is_seen_replaced(cluster):
    job = cluster("--steps", "400", "--hold", "6", nproc=2, spares=1)  # long enough to be looked at after the repair
    job.wait_state(1, 5)
    before = job.status()
    assert (before["health"], before["phase"], before["run"]["pid"]) == ("healthy", "running", job.pid)
    assert before["total_steps"] == 400
    assert [rank["pid"] for rank in before["ranks"]] == [job.pid_of(0), job.pid_of(1)]

    stacks = job.command_line("stack")
    assert [line.split()[2] for line in stacks.stdout.splitlines() if line.startswith("--- rank ")] == ["0", "1"]
    assert stacks.stdout.count("/train.py") >= 2, stacks.stderr

    unsaved = job.command_line("stop", "--save")
    assert (unsaved.returncode, unsaved.stdout) == (UsageError.exit_code, "")
    assert "has no --durable, so its progress would be lost" in unsaved.stderr

    victim = before["ranks"][1]
    (spare,) = before["spares"]
    done = job.command_line("kill-rank", "--spare")
    assert done.stdout == f"spare: worker {spare['worker']} (pid {spare['pid']}) was sent SIGKILL\n", done.stderr
    job.wait_status(
        lambda status: [each for each in status["spares"] if each["phase"] == "ready" and each["pid"] != spare["pid"]],
        "another spare",
    )
    done = job.kill_rank(1)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"rank 1: worker {victim['worker']} (pid {victim['pid']}) was sent SIGKILL\n"
    job.release()
    job.release()  # the step is repeated, and held again
    (incident,) = job.wait_status(lambda status: status["incidents"], "incident")
    (loss,) = incident["losses"]
    assert job.status()["cost"]["repairs"] == 1
    assert (loss["rank"], loss["injected"], loss["from_spare"]) == (1, True, True)
    assert job.wait_exit() == 0, job.told()

    after = job.command_line("status")
    assert (after.returncode, after.stdout) == (4, "")
    job.check_nothing_left()
