"""The live status of a real job."""

import sys

from kit.terminal import Terminal


def test_a_rank_of_a_real_job_is_killed_and_its_log_read_from_the_screen(cluster):
    job = cluster("--steps", "400", "--hold", "6", nproc=2, spares=1, options=("--tee", "3"))
    job.wait_state(1, 5)
    shown = job.status()
    (spare,) = shown["spares"]
    terminal = Terminal(sys.executable, "-m", "deadpool_run", "status", "--run-dir", str(job.run_dir), columns=120)
    try:
        terminal.wait_for("running", "step 6/400", "q quit", "100 %")
        terminal.type("1l")
        terminal.wait_for("log of rank 1", "attempt_0/1/stdout.log")
        terminal.type("q1k")
        terminal.wait_for(f"Kill rank 1 (worker {shown['ranks'][1]['worker']}) of ", "[y/N]")
        before = job.pid_of(1)
        terminal.type("y")
        terminal.wait_for(f"rank 1: worker {shown['ranks'][1]['worker']} (pid {before}) was sent SIGKILL")
        job.release()
        job.release()  # the step is repeated, and held again
        terminal.wait_for(f"recovered rank 1 (injected) on spare worker {spare['worker']}")
        assert job.wait_exit() == 0, job.told()
        assert terminal.exit_code() in {0, 3}
        assert "the run has ended" in terminal.screen.text
        terminal.check_restored()
    finally:
        terminal.close()
    job.check_nothing_left()
