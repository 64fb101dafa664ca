"""The nodes that are asked for copies by a new leader, and their answers."""

import pytest
from golden import Run

BEGIN = """
new world_size=3 nodes=3 replicas=1
join a b c
ready w0..w2
setup w0..w2
transcript w0..w2
committed 0
"""


@pytest.mark.parametrize("lost", ["the worker", "the node"])
def test_an_old_version_counts_if_no_other_is_common(lost):
    """Where a rank lived long ago, it has only old versions. They are left out, until no newer one is common."""
    run = Run()
    for line in BEGIN.strip().splitlines():
        run.command(line)
    run.state.term, run.state.epoch = 1, 1 << 20
    if lost == "the worker":
        run.command("kill w1 held=7")
    else:
        run.state.former_buddies = (("b",), ("a", "c"), ("a",))
        run.command("lose b: silent for 5 s")
        run.command("holds a rank=1 held=7")
        run.command("holds c rank=1 held=6")
        assert run.state.seats[1].copies == {"a": {7}}, "the old ones are left out"
    said = run.command("aborted w0 8 held=6") + run.command("aborted w2 8 held=6")
    asked = [dict(word.split("=") for word in line.split()[2:]) for line in said if "ReportReplicas" in line]
    assert ("c", "1") in {(each["node"], each["rank"]) for each in asked}
    for each in asked:
        old = "6" if each["node"] == "c" else ""
        run.command(f"holds {each['node']} rank={each['rank']} held={old}")
    assert run.state.repair.resume == 6
