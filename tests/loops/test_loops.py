"""What real training loops do, with a rank that dies wherever it may be: every state is that of a run that never failed."""

from pathlib import Path

import pytest
from kit.account import Event
from kit.choice import often
from matrix import (
    CHAIN_STEPS,
    COLUMNS,
    ITEMS,
    PER_EPOCH,
    PHASES,
    RANKS,
    SCRIPTS,
    job,
    patience,
    run_cell,
    run_chain,
    unfailed,
)

USUAL = {
    "Job.batches: shuffled, persistent workers, a generator",
}
"""Six cells, with all that a loader's processes add. The other items are for `make matrix`."""
EXACT = "exact"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("item", often(ITEMS, USUAL))
def test_a_death_in_every_phase(item, tmp_path, record_property, request):
    cells = dict.fromkeys(COLUMNS, "not run")
    record_property("item", item)
    record_property("cells", cells)  # of which the report takes what is in it at the end
    reference = unfailed(tmp_path / "reference", item, steps=CHAIN_STEPS)
    try:
        account = run_chain(tmp_path / "chain", item, reference).account
    except AssertionError:
        cells |= one_by_one(tmp_path, item)
        raise
    cells |= dict.fromkeys(PHASES, EXACT)
    if request.config.getoption("--matrix", default=None):
        theirs = unfailed(tmp_path / "torchrun", item, steps=CHAIN_STEPS, torchrun=True)
        cells["torchrun"] = EXACT if theirs == reference else "differs"
        assert theirs == reference, "an unfailed run differs from torchrun's"
    if item.startswith("Job.batches") and "own" not in item and "weighted" not in item:  # those draw with replacement
        check_samples(account.of("state"), PER_EPOCH * 4)


def one_by_one(folder: Path, item: str) -> dict[str, str]:
    """Return what each phase alone comes to, in words."""
    reference = unfailed(folder / "each", item)
    found = {}
    for phase in PHASES:
        try:
            run_cell(folder / phase, item, phase, reference)
        except AssertionError as error:
            found[phase] = str(error).splitlines()[0][:60]
        else:
            found[phase] = EXACT
    return found


def check_samples(told: list[Event], samples: int) -> None:
    """Assert that each rank's samples of each whole epoch were used once; a step that is run again counts once."""
    for rank in range(RANKS):
        for epoch in range(CHAIN_STEPS // PER_EPOCH):
            batches = {
                e["version"]: e["batch"][1] for e in told if e["rank"] == rank and e.get("batch", [-1])[0] == epoch
            }
            used = sorted(sample for batch in batches.values() for sample in batch)
            assert len(used) == len(set(used)) == samples, f"rank {rank}, epoch {epoch}: {used}"


def test_a_step_in_which_ddp_decided_its_buckets_is_undone_by_a_second_run_of_the_script(tmp_path):
    """It cannot be undone in the objects that there are. Here that is the third: the first two reduce nothing."""
    item = "gradient accumulation over steps, no_sync"
    reference = unfailed(tmp_path / "reference", item)
    cluster = job(tmp_path / "killed", item, "--die", "rank=2,step=3,at=capture")
    try:
        cluster.wait_exit(patience(item))
        (incident,) = cluster.incidents()
        assert incident["reentered"] == [0, 1]
        cluster.check_repaired(reference, [2])
    finally:
        cluster.close()


@pytest.mark.parametrize("place", ["at=optimizer,n=2", "at=optimizer,n=3"])
def test_a_step_within_which_ddp_decided_its_buckets_is_undone_by_a_second_run_of_the_script(place, tmp_path):
    """DDP decides in the second of three forwards, which no replacement rehearses."""
    item = "several updates in each step (PPO), after three steps without any"
    reference = unfailed(tmp_path / "reference", item)
    cluster = job(tmp_path / "killed", item, "--die", f"rank=1,step=3,{place}")
    try:
        assert cluster.wait_exit(patience(item)) == 0, cluster.told()
        assert [incident["reentered"] for incident in cluster.incidents()] == [[0, 2]]
        cluster.account.check_same_as(reference)
    finally:
        cluster.close()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_loss_in_the_first_reduction_of_ddp_is_exact(rank, tmp_path):
    """The survivors' DDPs have seen every gradient by then. They must not decide their buckets before the replacement's does.

    On a slow machine the job may not be protected yet: then the world starts again.
    """
    item = "gradient accumulation over steps, no_sync"
    reference = unfailed(tmp_path / "reference", item)
    cluster = job(tmp_path / "killed", item, "--die", f"rank={rank},step=2,at=backward")
    try:
        assert cluster.wait_exit(patience(item)) == 0, cluster.told()
        assert all(incident["reentered"] == [] for incident in cluster.incidents())
        cluster.account.check_same_as(reference)
    finally:
        cluster.close()


def test_the_items_are_those_that_the_script_has():
    assert len(ITEMS) == len(set(ITEMS))
    assert len(ITEMS) == sum(path.read_text(encoding="utf-8").count("\n@item(") for path in SCRIPTS.glob("items_*.py"))
