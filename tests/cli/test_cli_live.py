"""The commands on a real job."""

import json
import re
import urllib.request

from kit.dashboard import check_dashboard
from kit.trace_events import check_trace

from deadpool_run.errors import RequestRefusedError


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
    absent = job.command_line("stack", "7")
    assert (absent.returncode, absent.stdout) == (RequestRefusedError.exit_code, "")
    assert "there is no rank 7\n  ranks are 0 to 1\n" in absent.stderr

    unsaved = job.command_line("stop", "--save")
    assert (unsaved.returncode, unsaved.stdout) == (RequestRefusedError.exit_code, "")
    assert "has no --durable, so its progress would be lost\n  stop it without --save, or" in unsaved.stderr

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


def test_a_chaos_run_injects_its_faults_and_tells_programs_what_happened(cluster, tmp_path):
    told = tmp_path / "repaired"
    # The variables are for the command alone: on a shell's command line, the text of a cause would be code.
    command = f"""sh -c 'printf "%s\\n" "$DEADPOOL_INCIDENT_RANKS" "$DEADPOOL_INCIDENT_CAUSES" "$DEADPOOL_TOKEN" > {told}.new; mv {told}.new {told}'"""
    options = (
        "--log-format",
        "json",
        "--durable",
        str(tmp_path / "durable"),
        "--durable-every",
        "5",
        "--metrics-port",
        "0",
        "--on-repair",
        command,
        "--chaos",
        "seed 7; kill rank 1 at step 5",
    )
    # Slow steps: the loss comes before the hold, in which a survivor does not abort its step.
    script = ("--steps", "20", "--hold", "15", "--least-ms", "100")
    job = cluster(*script, nproc=2, spares=1, options=options, env={"DEADPOOL_TOKEN": "x" * 16})
    job.wait_state(1, 2)
    job.wait_stderr('"recovered"')
    job.wait_status(lambda status: status["durable"]["version"], "checkpoint")
    (port,) = re.findall(r'"port": (\d+)', job.stderr)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    assert "\ndeadpool_repairs_total 1.0\n" in metrics
    assert check_dashboard(metrics) > 20
    job.release()
    assert job.wait_exit() == 0, job.told()
    lines = [json.loads(line) for line in job.stderr.splitlines()]
    events = [line["event"] for line in lines]
    names = ("run_started", "chaos_planned", "protected", "fault_injected", "recovered", "run_ended", "chaos_verdict")
    assert [name for name in events if name in names] == list(names)
    assert {line["run_id"] for line in lines} == {json.loads((job.run_dir / "run.json").read_text())["run_id"]}
    (repair,) = (line for line in lines if line["event"] == "recovered")
    assert (repair["ranks"], repair["injected"], repair["level"]) == ([1], True, "info")
    verdict = lines[-1]
    assert (verdict["seed"], verdict["injected"], verdict["repaired"], verdict["survived"]) == (7, 1, 1, True)
    assert told.read_text().splitlines() == ["1", *repair["causes"], ""]

    page, traced = tmp_path / "report.html", tmp_path / "trace.json"
    done = job.command_line("report", "-o", str(page), "--trace", str(traced))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"<b>20</b><span>steps completed</span>.*<b>1</b><span>repairs</span>", page.read_text())
    assert "Step times" in page.read_text()
    names = [event["name"] for event in check_trace(traced.read_text())]
    assert {"repair of rank 1", "rank 1 gets sigkill", "completed steps"} <= {*names}
    job.check_nothing_left()
