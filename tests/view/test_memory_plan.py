"""Memory that snapshots and copies of a planned job need on each node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.core.events import Place
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord
from deadpool_run.view.memory_plan import Need, Room, lines, needs

GB = 10**9


def records(count):
    return [NodeRecord(f"n{at}", Place(name=f"n{at}"), at) for at in range(count)]


def told(settings, nodes, room, parameters=None):
    return list(lines(settings, records(nodes), Room(room, "a limit"), parameters))


def test_one_machine_has_two_snapshots_of_each_rank_and_no_copies():
    assert needs(Settings(world_size=3), records(1)) == [Need("n0", 3, 0)]
    assert told(Settings(world_size=3), 1, 12 * GB) == [
        "for each GiB of a rank's parameters and optimizer state:",
        "n0  6 GiB: 6 for snapshots of 3 ranks",
        "this machine may spend 12 GB: a limit",
        "up to 2 GB of state per rank fit; add --simulate-parameters COUNT to see what a model needs",
    ]


def test_a_spare_machine_holds_copies_only():
    settings = Settings(world_size=4, nodes=2, spare_nodes=1)
    assert needs(settings, records(3)) == [Need("n0", 2, 1), Need("n1", 2, 1), Need("n2", 0, 2)]
    assert told(settings, 3, GB)[1:4] == [
        "n0  7 GiB: 4 for snapshots of 2 ranks, 3 for copies of 1 rank",
        "n1  7 GiB: 4 for snapshots of 2 ranks, 3 for copies of 1 rank",
        "n2  6 GiB: 6 for copies of 2 ranks",
    ]


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 3))
def test_every_copy_is_counted_once(nodes, ranks, replicas):
    found = needs(Settings(world_size=nodes * ranks, nodes=nodes, replicas=replicas), records(nodes))
    assert sum(need.copies for need in found) == nodes * ranks * min(replicas, nodes - 1)


@pytest.mark.parametrize(
    ("room", "ddp", "fsdp"),
    [
        (100 * GB, "fits", "fits"),
        (60 * GB, "fits", "fits"),
        (59 * GB, "does not fit: 1 GB are missing", "fits"),
        (29 * GB, "does not fit: 31 GB are missing", "does not fit: 1 GB are missing"),
    ],
)
def test_a_model_fits_or_not(room, ddp, fsdp):
    """10^9 parameters have 12 GB of state. Each of two nodes takes five times that of its rank."""
    *_, state, whole, sharded = told(Settings(world_size=2, nodes=2), 2, room, GB)
    assert state == "1,000,000,000 parameters have 12 GB of state: 12 bytes each, as float32 with Adam's two moments"
    assert whole == f"whole on each rank (DDP): 12 GB per rank, so up to 60 GB per machine: {ddp}"
    assert sharded == f"sharded over all ranks (FSDP): 6 GB per rank, so up to 30 GB per machine: {fsdp}"


def test_machines_that_are_missing_are_not_counted():
    assert needs(Settings(world_size=4, nodes=4), records(2)) == [Need("n0", 1, 0), Need("n1", 1, 0)]
    assert told(Settings(world_size=4, nodes=4), 0, GB)[1:] == ["this machine may spend 1 GB: a limit"]
