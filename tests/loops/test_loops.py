"""Real training loops with a death in each phase: every state equals that of an unfailed run."""

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
"""The item of `make test`, with processes of a loader. `make matrix` runs the others, too."""
EXACT = "exact"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("item", often(ITEMS, USUAL))
def test_a_death_in_every_phase(item, tmp_path, record_property, request):
    cells = dict.fromkeys(COLUMNS, "not run")
    record_property("item", item)
    record_property("cells", cells)  # the report reads it at the end
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
    if item.startswith("Job.batches") and "own" not in item and "weighted" not in item:  # these draw with replacement
        check_samples(account.of("state"), PER_EPOCH * 4)


def one_by_one(folder: Path, item: str) -> dict[str, str]:
    """Return the result of each phase in its own run."""
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
    """Assert that each rank used each sample of a whole epoch once. A repeated step counts once."""
    for rank in range(RANKS):
        for epoch in range(CHAIN_STEPS // PER_EPOCH):
            batches = {
                e["version"]: e["batch"][1] for e in told if e["rank"] == rank and e.get("batch", [-1])[0] == epoch
            }
            used = sorted(sample for batch in batches.values() for sample in batch)
            assert len(used) == len(set(used)) == samples, f"rank {rank}, epoch {epoch}: {used}"


def test_survivors_re_enter_after_a_loss_in_the_step_in_which_ddp_decides_its_buckets(tmp_path):
    """DDP cannot change its buckets back. It decides them in the third step: the first two reduce nothing."""
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


@pytest.mark.parametrize("place", ["at=forward,n=6", "at=backward,n=6"])
def test_survivors_re_enter_after_a_loss_in_a_step_with_several_updates_that_decides_buckets(place, tmp_path):
    """DDP decides its buckets in the second of three forwards. No replacement rehearses that step.

    The loss is after the second backward, whose reductions need all ranks, so every DDP has decided them by then.
    """
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
    """The survivors have all gradients by then. Their DDPs must not decide buckets before the replacement's DDP does.

    On a slow machine the job may not be protected yet. Then the world starts again.
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


def test_all_items_of_the_script_are_found():
    assert len(ITEMS) == len(set(ITEMS))
    assert len(ITEMS) == sum(path.read_text(encoding="utf-8").count("\n@item(") for path in SCRIPTS.glob("items_*.py"))
