"""Metrics: their values, the server, and the names in the docs and the dashboard."""

import asyncio
import json
import os
import re
import socket
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families as parsed

from deadpool_run.agent.observers.metrics import RANKS_SHOWN, RepairTimes, families
from deadpool_run.agent.observers.metrics_server import MetricsServer
from deadpool_run.core.coordinator import new_state, step
from deadpool_run.core.effects import Incident, Loss
from deadpool_run.core.events import JobSubmitted
from deadpool_run.core.settings import Settings
from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.view.status_report import status_object

DOCS = Path(__file__).parents[3] / "docs"
RUN = {"run_id": 'ni"ght', "started": "2026-02-03T04:05:06+00:00", "world_size": 2, "nodes": 1, "spares": 1}
COST = {"repairs": 3, "moves": 1, "steps_repeated": 2, "lost_s": 1.5, "goodput": 0.97}
DURABLE = {"place": "ck", "version": 100, "where": "ck/100", "written": "2026-02-03T04:05:06+00:00"}
INCIDENT = Incident(2, (), 30, 3, 0.05, 0.1, 0.01, 0.4, 0.45, 0.5, 0.6)
LIMIT_S = 30


@pytest.fixture
def page():
    fd = create_status_page(2)
    made = StatusPage(fd, 2)
    for rank, entry in enumerate(made.rank_entries):
        entry.completed, entry.step_ns, entry.taken = 120 + rank, 50_000_000 * (1 + rank), 1 << 20
        entry.set_slot(0, 119)
    yield made
    made.close()
    os.close(fd)


@pytest.fixture
def status(page):
    state = new_state(Settings(world_size=2, spares=1))
    step(Settings(world_size=2, spares=1), state, JobSubmitted(), 0.0)
    return {**status_object(state, page, RUN, DURABLE, dropped={}, now=0.0), "cost": COST}


def served(ask, page, talk, repairs=()):
    """Return the result of `talk`, called with the port of a server. An error in the loop would end the agent."""
    errors = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        server = MetricsServer(("127.0.0.1", 0), ask, lambda: page)
        for incident in repairs:
            server.repaired(incident)
        async with asyncio.timeout(LIMIT_S):
            try:
                return await talk(server.port)
            finally:
                server.close()

    result = asyncio.run(run())
    assert errors == []
    return result


async def answer(port, request):
    """Return the status line and the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head.partition("\r\n")[0], body


def get(port, target="/metrics"):
    return answer(port, f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())


def values(text):
    return {(each.name, *each.labels.values()): each.value for family in parsed(text) for each in family.samples}


def test_the_metrics_are_those_of_the_run(page, status):
    asked = []
    move = replace(INCIDENT, losses=(Loss(1, 1, "was drained", False, 2, True, planned=True),), steps_repeated=0)
    repairs = (INCIDENT, move, replace(INCIDENT, first_step_s=7.0))
    line, text = served(lambda request: asked.append(request) or status, page, get, repairs)
    assert line == "HTTP/1.1 200 OK"
    assert asked == [{"do": "status"}]
    found = values(text)
    expected = {
        ("deadpool_run_info", 'ni"ght', "0.1.0"): 1,
        ("deadpool_job_phase", "starting"): 1,
        ("deadpool_job_phase", "running"): 0,
        ("deadpool_completed_steps",): 121,
        ("deadpool_step_duration_seconds",): 0.1,
        ("deadpool_spares_requested",): 1,
        ("deadpool_spares_ready",): 0,
        ("deadpool_repairs_total",): 3,
        ("deadpool_moves_total",): 1,
        ("deadpool_repeated_steps_total",): 2,
        ("deadpool_lost_seconds_total",): 1.5,
        ("deadpool_goodput_ratio",): 0.97,
        ("deadpool_snapshot_step",): 119,
        ("deadpool_snapshot_memory_bytes",): 2 << 20,
        ("deadpool_checkpoint_step",): 100,
        ("deadpool_start_time_seconds",): 1770091506,
        ("deadpool_rank_completed_steps", "", "1"): 121,
        ("deadpool_repair_duration_seconds_bucket", "0.5"): 0,
        ("deadpool_repair_duration_seconds_bucket", "1.0"): 1,
        ("deadpool_repair_duration_seconds_bucket", "+Inf"): 2,
        ("deadpool_repair_duration_seconds_sum",): 7.7,
    }
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)


def test_a_large_job_has_no_series_of_ranks(page, status):
    ranks = status["ranks"] * (RANKS_SHOWN // 2 + 1)
    names = {each.name for each in families({**status, "ranks": ranks}, page, RepairTimes(), "1")}
    assert "deadpool_ranks" in names
    assert not [name for name in names if name.startswith("deadpool_rank_")]


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", "HTTP/1.1 200 OK"),
        (b"x" * 100_000, ""),
    ],
)
def test_other_requests_are_refused_and_harm_nothing(page, status, request_, line):
    async def talk(port):
        try:
            first, _ = await answer(port, request_)
        except ConnectionError:
            first = ""
        return first, (await get(port))[0]

    assert served(lambda _: status, page, talk) == (line, "HTTP/1.1 200 OK")


def test_a_bug_in_the_metrics_does_not_end_the_job(page, capfd):
    assert served(lambda _: {}, page, get) == ("", "")
    assert "metrics: a request failed: KeyError('run')" in capfd.readouterr().err


def test_a_port_that_is_taken_costs_the_metrics_and_not_the_job(page, capfd):
    async def run(port):
        MetricsServer(("127.0.0.1", port), dict, lambda: page).close()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(run(taken.getsockname()[1]))
    assert "no metrics: cannot listen on 127.0.0.1:" in capfd.readouterr().err


def names_of(status, page):
    made = families({**status, "exposed_ms": None}, page, RepairTimes(), "1")
    return {f"{each.name}{ {'counter': '_total', 'info': '_info'}.get(each.type, '') }" for each in made}


def test_the_page_names_every_metric(page, status):
    table = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(deadpool_\w+)", table, re.MULTILINE)) == names_of(status, page)


def test_the_dashboard_asks_for_metrics_that_there_are(page, status):
    text = (DOCS / "grafana" / "deadpool-run.json").read_text(encoding="utf-8")
    panels = json.loads(text)["panels"]
    asked = {
        name
        for panel in panels
        for target in panel.get("targets", ())
        for name in re.findall(r"deadpool_\w+", target["expr"])
    }
    known = names_of(status, page) | {"deadpool_repair_duration_seconds_bucket"}
    assert asked <= known
    assert len(asked) > len(known) // 2
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
