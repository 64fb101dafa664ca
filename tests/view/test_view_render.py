"""The text of a status."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from deadpool_run.vault.status_page import DeviceLibrary
from deadpool_run.view import capture_limit
from deadpool_run.view.collectives import expected
from deadpool_run.view.health import EXIT_CODES, JobHealth, health
from deadpool_run.view.render import to_json, to_plain

NOW = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)


def status(**changed):
    ranks = [
        {
            "rank": rank,
            "worker": rank,
            "pid": 4710 + rank,
            "phase": "running",
            "activity": "step",
            "step": 120,
            "step_ms": 12.345,
            "capture_ms": 1.5,
            "snapshots": [119, 120 - rank],
            "cpu_cores": None if rank else 1.873,
            "memory_bytes": None if rank else 2_340_000_000,
        }
        for rank in range(2)
    ]
    return {
        "phase": "running",
        "epoch": 3,
        "generation": 0,
        "restarts": 0,
        "managed": True,
        "ranks": ranks,
        "spares": [{"worker": 2, "pid": 4712, "phase": "ready"}],
        "capture_interval": 1,
        "committed": 119,
        "schema_version": 1,
        "resume": None,
        "incidents": [],
        "reason": "every rank is attached",
        "run": {"run_id": "night", "world_size": 2, "spares": 1, "started": (NOW - timedelta(seconds=192)).isoformat()},
        **changed,
    }


INCIDENT = {
    "epoch": 2,
    "resumed": 57,
    "steps_repeated": 1,
    "detected_s": 0.003,
    "aborted_s": 0.0154,
    "promoted_s": 0.001,
    "rehearsed_s": 0.2,
    "restored_s": 0.21,
    "attached_s": 0.22,
    "first_step_s": 0.2451,
    "losses": [
        {
            "rank": 1,
            "worker": 1,
            "cause": "was killed by SIGKILL",
            "injected": True,
            "replacement": 2,
            "from_spare": True,
        }
    ],
}


USED = ("187", "%", "2.34", "GB")


def words_of(text):
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("changed", "expected", "code"),
    [
        ({}, JobHealth.HEALTHY, 0),
        ({"phase": "starting", "spares": []}, JobHealth.STARTING, 0),
        ({"phase": "setting up", "spares": []}, JobHealth.STARTING, 0),
        ({"phase": "setting up", "unprotected_reason": ""}, JobHealth.STARTING, 0),
        ({"phase": "setting up", "unprotected_reason": "no init()"}, JobHealth.UNPROTECTED, 3),
        ({"phase": "finishing", "spares": []}, JobHealth.HEALTHY, 0),
        ({"phase": "repairing"}, JobHealth.RECOVERING, 3),
        ({"phase": "restarting"}, JobHealth.RECOVERING, 3),
        ({"phase": "stopping"}, JobHealth.ENDING, 3),
        ({"spares": []}, JobHealth.DEGRADED, 3),
        ({"spares": [{"worker": 2, "pid": 1, "phase": "starting"}]}, JobHealth.DEGRADED, 3),
    ],
)
def test_health_and_its_exit_code(changed, expected, code):
    found = health(status(**changed))
    assert (found, EXIT_CODES[found]) == (expected, code)


@pytest.mark.parametrize("phase", ["preparing", "ready"])
def test_a_hot_spare_is_shown_with_the_rank_that_it_rehearses(phase):
    spare = {"worker": 2, "pid": 4712, "phase": phase, "prepared": 1}
    assert f"spares: worker 2 (pid 4712) {phase} as rank 1" in to_plain(status(spares=[spare]), NOW)


def test_plain_text_tells_job_ranks_and_spares():
    text = to_plain(status(), NOW)
    first, *rest = words_of(text)
    assert " ".join(first) == "run night running epoch 3 world 2 spares 1 of 1 ready committed 119 up 3m12s"
    assert ["RANK", "PID", "WORKER", "PHASE", "STEP", "SNAPSHOT", "MS/STEP", "CPU", "MEMORY"] in rest
    assert ["0", "4710", "0", "running", "(step)", "120", "120", "12.3", *USED] in rest
    assert ["1", "4711", "1", "running", "(step)", "120", "119", "12.3", "-", "-"] in rest
    assert "spares: worker 2 (pid 4712) ready" in text
    assert "last repairs" not in text
    assert "\x1b" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("percent", "memory", "expected"), [(97, 41_500_000_000, "97 %, 41.5 GB"), (None, 41_500_000_000, "41.5 GB")]
)
def test_gpus_are_shown_where_there_are_some(percent, memory, expected):
    assert "GPU" not in to_plain(status(), NOW)
    with_gpu = status()
    with_gpu["ranks"][1] |= {"gpu_percent": percent, "gpu_memory_bytes": memory}
    header, first, second = to_plain(with_gpu, NOW).splitlines()[2:5]
    assert header.endswith("MEMORY" + "GPU".rjust(len(expected) + 2))
    assert first.endswith(" -")
    assert second.endswith(f"  {expected}")


def test_a_narrow_terminal_shows_the_cpu_in_place_of_the_snapshot():
    headers = [words for words in words_of(to_plain(status(), NOW, width=60)) if "RANK" in words]
    assert headers == [["RANK", "PID", "PHASE", "STEP", "MS/STEP", "CPU", "MEMORY"]]


def test_an_incident_is_one_line_with_its_times_in_milliseconds():
    text = to_plain(status(incidents=[INCIDENT]), NOW)
    line = next(line for line in text.splitlines() if "SIGKILL" in line)
    assert "rank 1 (worker 1) was killed by SIGKILL, injected  spare worker 2" in line
    assert line.split()[-9:] == ["57", "1", "3", "1", "15", "200", "210", "220", "245"]
    unknown = to_plain(status(incidents=[{**INCIDENT, "detected_s": None}]), NOW)
    assert next(line for line in unknown.splitlines() if "SIGKILL" in line).split()[-7] == "-"


def moved(**changed):
    loss = {**INCIDENT["losses"][0], "cause": "was drained", "injected": False, "planned": True}
    return {**INCIDENT, "steps_repeated": 0, "losses": [loss], **changed}


def test_a_planned_move_is_told_from_a_loss():
    text = to_plain(status(incidents=[INCIDENT, moved()]), NOW)
    lost, drained = (line for line in text.splitlines() if "rank 1 (worker 1)" in line)
    assert "was killed by SIGKILL, injected  spare worker 2" in lost
    assert " ".join(drained.split()).startswith("2 - rank 1 (worker 1) moved by drain spare worker 2 ")
    assert "LOST OR MOVED" in text
    with_a_loss = to_plain(status(incidents=[moved(losses=[*INCIDENT["losses"], *moved()["losses"]])]), NOW)
    assert "rank 1 (worker 1) was drained" in with_a_loss
    cost = {"repairs": 0, "moves": 2, "steps_repeated": 0, "lost_s": 0.71, "goodput": 0.948}
    assert "  2 planned moves: 0.7 s lost, 0 steps repeated, goodput 94.8 %" in to_plain(status(cost=cost), NOW)
    both = to_plain(status(cost={**cost, "repairs": 1, "moves": 1}), NOW)
    assert "  1 repair, 1 planned move: 0.7 s lost, " in both


def test_a_repair_has_its_time_of_day():
    ended = NOW - timedelta(minutes=3)
    text = to_plain(status(incidents=[INCIDENT, {**INCIDENT, "epoch": 3, "ended": ended.isoformat()}]), NOW)
    rows = [line.split() for line in text.splitlines() if "SIGKILL" in line]
    assert [row[:2] for row in rows] == [["2", "-"], ["3", ended.astimezone().strftime("%H:%M:%S")]]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_tables_fit_into_the_width_of_a_terminal(width):
    shown = several(incidents=[INCIDENT, moved()], total_steps=2400)
    lines = to_plain(shown, NOW, width).splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]
    heads = [line.split() for line in lines if line.startswith(("RANK", "NODE", "EPOCH", "ENDED"))]
    assert [head[0] for head in heads] == ["NODE", "RANK", "ENDED" if width == 80 else "EPOCH"]
    assert ("SENT" in heads[0], "ABORTED" in heads[2]) == (width >= 100, width == 200)
    assert "FIRST" in heads[2]


def test_the_rate_is_that_which_the_viewer_has_seen():
    shown = status(total_steps=2400)
    assert "  81 steps/s  28s left" in to_plain(shown, NOW)
    assert "  76 steps/s  30s left" in to_plain(shown, NOW, per_s=76.0)


def test_trouble_is_named_with_its_reason():
    text = to_plain(status(phase="repairing", reason="rank 1 died"), NOW)
    assert "repairing (recovering)" in text.splitlines()[0]
    assert text.splitlines()[1].strip() == "rank 1 died"


def test_an_unprotected_job_says_why_and_how_that_is_mended():
    text = to_plain(
        status(phase="setting up", unprotected_reason="outside job.steps(): write it so", reason="other"), NOW
    )
    assert "setting up (unprotected)" in text.splitlines()[0]
    assert text.splitlines()[1].strip() == "outside job.steps(): write it so"
    assert json.loads(to_json(status(phase="setting up", unprotected_reason="x"), NOW))["health"] == "unprotected"


def test_a_young_job_is_starting():
    young = status(phase="setting up", unprotected_reason="", reason="every rank has a worker")
    first, second, *_ = to_plain(young, NOW).splitlines()
    assert "setting up (starting)" in first
    assert not second


def test_only_logs_with_dropped_lines_are_named():
    dropped = {"console": 12, "logs": 0, "journal": 3}
    first, *_ = to_plain(status(dropped_lines=dropped), NOW).splitlines()
    assert first.endswith("12 lines of the console dropped  3 lines of the journal dropped")
    assert "dropped" not in to_plain(status(), NOW)


def test_a_vacant_rank_and_a_young_run_are_shown():
    ranks = [{"rank": 0, "worker": None, "pid": None, "phase": "vacant", "snapshots": []}]
    text = to_plain(status(ranks=ranks, spares=[], capture_interval=4, restarts=2), NOW)
    assert ["0", "-", "-", "vacant", *"-----"] in words_of(text)
    assert "restarts 2  a snapshot every 4 steps" in text
    assert "spares: none" in text


def test_a_status_of_which_nothing_is_known_is_shown():
    assert to_plain({}, NOW).startswith("run -  -")
    assert json.loads(to_json({}, NOW))["health"] == "healthy"


def test_a_script_that_never_calls_init_has_no_steps():
    assert ["0", "4710", "0", "running", "(step)", "-", "120", "12.3", *USED] in words_of(
        to_plain(status(managed=False), NOW)
    )


def test_ranks_that_are_about_to_move():
    draining = {"ranks": [2, 3], "node": "n07", "at": None}
    assert "\n  draining rank 2, 3 of node n07: spares prepare\n" in to_plain(status(draining=draining), NOW)
    draining = {"ranks": [1], "node": None, "at": 9}
    assert "\n  draining rank 1: all ranks stop after step 9\n" in to_plain(status(draining=draining), NOW)
    assert "draining" not in to_plain(status(draining=None), NOW)


def test_json_is_one_line_with_schema_and_utc_times():
    line = to_json(status(incidents=[INCIDENT]), NOW)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["schema_version"], said["health"], said["committed"]) == (1, "healthy", 119)
    assert said["time"] == "2026-02-03T04:05:06.000+00:00"
    assert said["incidents"] == [INCIDENT]


def test_what_a_script_said_cannot_steer_the_terminal_or_the_markup():
    text = to_plain(status(phase="stopping", reason="\x1b[2J[bold]boom[/bold]\nmore"), NOW)
    assert "\x1b" not in text
    assert "[bold]boom[/bold] more" in text.splitlines()[1]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (59, "59s"), (61, "1m01s"), (3600, "1h00m"), (90061, "25h01m"), (200000, "2d7h"), (-5, "0s")],
)
def test_uptime(seconds, shown):
    run = {"run_id": "r", "spares": 0, "started": (NOW - timedelta(seconds=seconds)).isoformat()}
    assert to_plain(status(run=run), NOW).splitlines()[0].endswith(f"up {shown}")


def several(**changed):
    copies = {"sent_bytes": 1_500_000_000, "received_bytes": 999, "sent_bytes_per_s": 12e6, "received_bytes_per_s": 0.0}
    place = {"address": "10.0.0.1", "port": 29400, "leaf": ""}
    nodes = [
        {"node": "a", **place, "ranks": [0, 1], "copies_of": [2], "silent_ms": None, "copies": copies},
        {"node": "b", **place, "ranks": [], "copies_of": [0, 1, 3], "silent_ms": 412.0, "copies": None},
    ]
    shown = status(coordinator={"node": "a", "term": 2}, nodes=nodes, exposed_ms=None)
    shown["run"] |= {"nodes": 1, "spare_nodes": 1, "spares": 0}
    return {**shown, **changed}


def test_a_node_is_one_line():
    text = to_plain(several(), NOW)
    assert "nodes 2  led by a (term 2)" in text.splitlines()[0]
    lines = words_of(text)
    assert ["a", "10.0.0.1:29400", "ranks", "0-1", "2", "leads", "1.5", "GB", "999", "B", "12", "MB", "0", "B"] in lines
    assert ["b", "10.0.0.1:29400", "spare", "0-1,", "3", "0.4", "s", "ago", "-", "-", "-", "-"] in lines
    assert ["RANK", "NODE", "PID", "WORKER", "PHASE", "STEP", "SNAPSHOT", "MS/STEP", "CPU", "MEMORY"] in lines


def test_ranks_without_memory_for_snapshots_are_a_worse_job():
    ranks = [{"rank": rank, "phase": "running", "no_memory_bytes": 2**30 * (rank == 1)} for rank in range(2)]
    spares = [{"worker": worker, "pid": 1, "phase": "ready"} for worker in (2, 3)]
    assert health(several(spares=spares, ranks=ranks)) is JobHealth.DEGRADED
    assert "no memory for snapshots of 1 rank " in to_plain(several(spares=spares, ranks=ranks), NOW)


def limited(interval, capture_ms, *copies, **changed):
    """A job whose user asked for a snapshot every second step."""
    ranks = [{"rank": rank, "phase": "running", "capture_ms": capture_ms * rank} for rank in range(2)]
    nodes = [
        {"node": f"n{at}", "copies": {"copied_s": copied, "hashed_s": hashed}}
        for at, (copied, hashed) in enumerate(copies)
    ]
    shown = several(ranks=ranks, nodes=nodes, capture_interval=interval, **changed)
    shown["run"]["capture_interval"] = 2
    return {**shown, "capture_limit": capture_limit.limit(shown)}


def test_the_longest_part_of_a_snapshot_limits_the_interval():
    assert limited(2, 900.0)["capture_limit"] is None, "as requested"
    assert limited(4, 900.0)["capture_limit"] == {"by": "capture", "capture_ms": 900.0, "copy_ms": 0.0, "hash_ms": 0.0}
    assert limited(4, 900.0, (0.8, 0.7))["capture_limit"]["by"] == "capture"
    slow_link = limited(4, 40.0, (0.8, 0.7), (1.0, 0.25), (0.0, 0.0))["capture_limit"]
    assert slow_link == {"by": "link", "capture_ms": 40.0, "copy_ms": 1000.0, "hash_ms": 250.0}
    assert limited(4, 40.0, (1.0, 0.75))["capture_limit"]["by"] == "hashing"


def test_memory_limits_snapshots_whatever_the_times_are():
    assert limited(2, 900.0, (0.1, 0.0))["capture_limit"] is None
    short = limited(2, 900.0)
    short["ranks"][0]["no_memory_bytes"] = 2**30
    assert capture_limit.limit(short)["by"] == "memory"
    refused = limited(2, 900.0, (0.1, 0.0))
    refused["nodes"][0]["copies"]["without_memory"] = 1
    assert capture_limit.limit(refused)["by"] == "memory"


def test_the_limit_is_shown_with_the_interval():
    assert "limited" not in to_plain(limited(2, 900.0), NOW)
    assert "  the snapshot interval is limited by capturing: capture 900 ms\n" in to_plain(limited(4, 900.0), NOW)
    words = "  the snapshot interval is limited by copying to other nodes: capture 40 ms, copy 1000 ms, 250 ms of it hashing\n"
    assert words in to_plain(limited(4, 40.0, (1.0, 0.25)), NOW)
    assert json.loads(to_json(limited(4, 40.0, (1.0, 0.75)), NOW))["capture_limit"]["by"] == "hashing"


def test_refused_copies_are_a_worse_job():
    spares = [{"worker": worker, "pid": 1, "phase": "ready"} for worker in (2, 3)]
    nodes = [{"node": "a", "copies": {"without_memory": 2}}, {"node": "b", "copies": None}]
    assert health(several(spares=spares, nodes=nodes)) is JobHealth.DEGRADED
    assert "no memory for 2 copies " in to_plain(several(spares=spares, nodes=nodes), NOW)


def test_ranks_without_all_their_copies_are_a_worse_job():
    assert "copies incomplete for 3.2 s" in to_plain(several(exposed_ms=3210.0), NOW)
    spares = [{"worker": worker, "pid": 1, "phase": "ready"} for worker in (2, 3)]
    assert health(several(spares=spares)) is JobHealth.HEALTHY
    assert health(several(spares=spares, exposed_ms=1.0)) is JobHealth.DEGRADED
    assert health(several(spares=spares[:1])) is JobHealth.DEGRADED, (
        "a node in reserve is as many spares as it has places"
    )


READY = {"pid": 1, "phase": "ready"}


@pytest.mark.parametrize(
    ("asked", "spares", "shown"),
    [
        ({"spare_nodes": 1}, {2: "b", 3: "b"}, "spare nodes 1 of 1 ready"),
        ({"spare_nodes": 1}, {2: "b"}, "spare nodes 0 of 1 ready  spare workers 1 ready, 0 asked for"),
        (
            {"spare_nodes": 1, "spares": 1},
            {2: "b", 3: "b", 4: "a"},
            "spare nodes 1 of 1 ready  spare workers 1 of 1 ready",
        ),
        ({"spares": 2}, {4: "a"}, "spare workers 1 of 2 ready"),
        ({}, {2: "b", 3: "b"}, "spare nodes 1 ready, 0 asked for"),  # it came later
        ({}, {}, "spare workers 0 of 0 ready"),
    ],
)
def test_nodes_in_reserve_are_told_from_workers_in_reserve(asked, spares, shown):
    found = several(spares=[{"worker": worker, "node": node, **READY} for worker, node in spares.items()])
    found["run"] |= {"spare_nodes": 0, **asked}
    text = to_plain(found, NOW)
    assert f"world 2  {shown}  committed" in text.splitlines()[0]
    assert all(f"worker {worker} ({node}, pid 1) ready" in text for worker, node in spares.items())


@pytest.mark.parametrize(("exposed_s", "shown"), [(None, "-"), (0.3512, "351")])
def test_a_repair_says_how_long_copies_were_incomplete(exposed_s, shown):
    text = to_plain(several(incidents=[{**INCIDENT, "exposed_s": exposed_s}]), NOW)
    assert next(line for line in text.splitlines() if "SIGKILL" in line).split()[-1] == shown


def test_what_is_durable_is_shown_with_its_age():
    newest = {"version": 90, "where": "/kept/step-00000090", "written": (NOW - timedelta(seconds=192)).isoformat()}
    text = to_plain(status(durable={"place": "/kept", **newest}), NOW)
    assert "durable: step 90, 3m12s old, in /kept/step-00000090" in text
    nothing = {"place": "/kept", "version": None, "where": None, "written": None}
    assert "durable: nothing yet, in /kept" in to_plain(status(durable=nothing), NOW)
    assert "durable" not in to_plain(status(durable=None), NOW)


@pytest.mark.parametrize(
    ("library", "promise"), [("nccl2", "aborts wait for no other rank"), ("nccl", "best effort"), ("other", "a test's")]
)
def test_the_library_for_gpus_is_shown_with_its_promise(library, promise):
    (line,) = [line for line in to_plain(status(device_library=library), NOW).splitlines() if "on GPUs" in line]
    assert (library in line, promise in line) == (True, True)
    assert "on GPUs" not in to_plain(status(device_library=None), NOW)


@pytest.mark.parametrize(
    ("version", "gpus", "environment", "library"),
    [
        ("2.15.0+cu130", 2, {}, DeviceLibrary.NCCL2),
        ("3.0.0", 1, {"TORCH_DIST_USE_NCCL2": "1"}, DeviceLibrary.NCCL2),
        ("2.15.0", 2, {"TORCH_DIST_USE_NCCL2": "0"}, DeviceLibrary.NCCL),
        ("2.14.1", 8, {}, DeviceLibrary.NCCL),
        ("2.15.0+cpu", 2, {}, DeviceLibrary.NONE),
        ("2.15.0", 0, {}, DeviceLibrary.NONE),
        ("(not installed)", 2, {}, DeviceLibrary.NONE),
    ],
)
def test_the_library_that_workers_will_use_is_known_without_torch(version, gpus, environment, library):
    assert expected(version, gpus, environment) is library


def test_progress_and_the_cost_of_repairs_have_a_line():
    cost = {"repairs": 1, "steps_repeated": 1, "lost_s": 0.71, "goodput": 0.948}
    assert to_plain(status(total_steps=2400, cost=cost), NOW).splitlines()[1] == (
        "  step 120/2,400 (5 %)  81 steps/s  28s left  1 repair: 0.7 s lost, 1 step repeated, goodput 94.8 %"
    )
    assert to_plain(status(total_steps=120), NOW).splitlines()[1] == "  step 120/120 (100 %)  81 steps/s"
    assert "steps/s" not in to_plain(status(managed=False, total_steps=None), NOW)


def test_a_slowed_rank_is_said_to_be_so():
    now = status()
    now["ranks"][1]["slowed"] = 2.5
    assert [line.count("running (step, slowed 2.5x)") for line in to_plain(now, NOW).splitlines()].count(1) == 1
    assert to_plain(now, NOW).count("slowed") == 1
