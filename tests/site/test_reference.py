"""The reference pages name what there is: status, journal, records, variables and formats."""

import inspect
import os
import re
from pathlib import Path

import journal_reference

from deadpool_run.agent.node import assignment
from deadpool_run.agent.records import run_record
from deadpool_run.coordinator import journal
from deadpool_run.core.coordinator import new_state, step
from deadpool_run.core.effects import Incident, Loss
from deadpool_run.core.events import JobSubmitted
from deadpool_run.core.settings import Settings
from deadpool_run.ids import ONLY_NODE
from deadpool_run.vault import checkpoint_format
from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.view import capture_limit, render, status_report
from deadpool_run.wire import auth
from deadpool_run.wire.peers import Durable, Traffic
from deadpool_run.worker.process import session

DOCS = Path(__file__).parents[2] / "docs"


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def section(name, heading):
    return page(name).partition(f"\n{heading}\n")[2].partition("\n## ")[0]


def fields(text):
    """Return the names in the first column of a table."""
    return set(re.findall(r"`([\w]+)`", "\n".join(re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE))))


def status():
    settings = Settings(world_size=2, spares=1)
    state = new_state(settings)
    step(settings, state, JobSubmitted(), 0.0)
    fd = create_status_page(2)
    status_page = StatusPage(fd, 2)
    seen = {ONLY_NODE: status_report.Seen(None, None)}
    nodes = status_report.NodeReports(ONLY_NODE, 0, (ONLY_NODE,), seen, 0.0, 0.0)
    try:
        return status_report.status_object(state, status_page, {}, None, nodes, dropped={}, now=0.0)
    finally:
        status_page.close()
        os.close(fd)


def test_the_status_has_the_fields_of_its_page():
    found = status()
    assert fields(section("status-schema.md", "## Top level")) == {*found, "time", "health", "cost"}
    assert f"| `schema_version` | {status_report.SCHEMA_VERSION} |" in page("status-schema.md")
    for heading, objects in (("A rank", "ranks"), ("A spare", "spares"), ("A node", "nodes")):
        assert fields(section("status-schema.md", f"## {heading}")) == set(found[objects][0]), heading
    assert fields(section("status-schema.md", "## An incident")) == {*Incident.__struct_fields__, "ended"}


def test_the_parts_of_the_status_are_named():
    text = page("status-schema.md")
    limit = {"by", "capture_ms", "copy_ms", "hash_ms"}
    assert all(name in inspect.getsource(capture_limit) for name in limit)
    for name in (*Loss.__struct_fields__, *Traffic.__struct_fields__, *Durable.__struct_fields__, *limit):
        assert f"`{name}`" in text, name
    assert all(f"`{health.value}`" in text for health in render.JobHealth)


def test_the_journals_tables_are_those_of_the_code():
    table = page("run-directory.md").partition("python tests/site/journal_reference.py` -->\n")[2]
    table = table.partition("<!-- end of journal -->")[0]
    assert table.strip() == journal_reference.reference(), "run `python tests/site/journal_reference.py` and paste it"


def test_the_record_has_the_fields_of_its_page():
    written = set(re.findall(r'^            "(\w+)":', inspect.getsource(run_record.RunRecord), re.MULTILINE))
    assert fields(section("run-directory.md", "## run.json")) == written


def test_every_variable_of_a_worker_is_named():
    sources = inspect.getsource(assignment) + inspect.getsource(session)
    for name in set(re.findall(r'"((?:[A-Z]+_)*[A-Z]+)":', sources)) - {"DEADPOOL_CONTROL_FD"}:
        assert f"`{name}`" in page("environment.md"), name


def test_the_changelog_has_the_formats():
    formats = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|", page("changelog.md"), re.MULTILINE))
    assert formats == {
        "status object": str(status_report.SCHEMA_VERSION),
        "`run.json`": str(run_record.SCHEMA_VERSION),
        "journal": str(journal.FORMAT),
        "durable checkpoint": str(checkpoint_format.FORMAT),
        "messages between agents": str(auth.VERSION),
    }


def test_the_readme_has_the_number_of_loops():
    loops = re.findall(r"^\| .* \|(?: exact \|){7}$", page("compatibility.md"), re.MULTILINE)
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\[(\d+) kinds of training loops\]", readme) == [str(len(loops))]
