"""A rank dies in a loop whose collectives run on a device with NCCL's semantics, wherever it may be in a step.

Every state is that of an unfailed run over Gloo: a commit of what an abort has spoilt would show as NaN. And no process does
anything that NCCL forbids.
"""

import pytest
from kit.choice import often
from kit.device.fake_communicator import VIOLATIONS_VARIABLE

PLACES = {
    "forward": "at=forward,n=1",
    "backward": "at=backward,n=1",
    "collective issued": "at=collective,n=1",
    "optimizer": "at=optimizer,n=3",
    "capture": "at=after",
    "between": "at=between",
}
LAYOUTS = ("ddp-full", "fsdp", "hsdp", "tp", "pp")
USUAL = {"pp"}
"""The one that coalesces."""
STEPS = 22


@pytest.mark.parametrize("layout", often(LAYOUTS, USUAL))
def test_a_death_in_every_phase_of_a_loop_on_a_device(cluster, reference, layout, tmp_path, record_property):
    cells = dict.fromkeys(PLACES, "not exact")
    record_property("layout", layout)
    record_property("cells", cells)  # of which the report takes what is in it at the end
    violations = tmp_path / "violations"
    deaths = [
        (number % 4, f"rank={number % 4},step={3 + 3 * number},{at}") for number, at in enumerate(PLACES.values())
    ]
    words = [word for _, text in deaths for word in ("--die", text)]
    env = {"FAKE_DEVICE": "1", VIOLATIONS_VARIABLE: str(violations)}
    job = cluster("--layout", layout, "--steps", str(STEPS), *words, env=env)
    job.check_repaired(reference(layout, STEPS), [rank for rank, _ in deaths])
    assert len(job.account.of("dying")) == len(deaths)
    assert all(told["launches"] >= STEPS for told in job.account.of("device"))
    assert len(job.account.of("device")) == 4
    assert not violations.exists(), violations.read_text(encoding="utf-8")
    cells |= dict.fromkeys(PLACES, "exact")


def test_rungs_of_the_ladder_on_a_device(cluster, reference, tmp_path):
    """`make test-device` climbs it whole: here two die at once, a replacement in its rehearsal, and rank 0."""
    violations = tmp_path / "violations"
    deaths = ("rank=1,step=4,at=forward", "rank=2,step=4,at=forward", "rank=3,step=7,at=collective")
    more = ("rank=3,step=1,at=rehearsal", "rank=0,step=10,at=optimizer,n=3")
    words = [word for text in (*deaths, *more) for word in ("--die", text)]
    env = {"FAKE_DEVICE": "1", VIOLATIONS_VARIABLE: str(violations)}
    job = cluster("--layout", "ddp-full", "--steps", "14", *words, env=env)
    job.check_repaired(reference("ddp-full", 14), [1, 2, 3, 3, 0])
    assert not violations.exists(), violations.read_text(encoding="utf-8")


def test_a_scaler_that_skips_the_update_of_an_aborted_step(cluster, reference, tmp_path):
    """It finds the NaN of the aborted collective. Survivors keep their run of the script, as with an optimizer that is stopped."""
    violations = tmp_path / "violations"
    words = ("--layout", "ddp-scaled", "--steps", "9", "--die", "rank=1,step=4,at=collective,n=1")
    job = cluster(*words, env={"FAKE_DEVICE": "1", VIOLATIONS_VARIABLE: str(violations)})
    job.check_repaired(reference("ddp-scaled", 9), [1])
    assert len(job.account.of("start")) == 5, "a survivor has run its script again"
    assert not violations.exists(), violations.read_text(encoding="utf-8")


AHEAD = 4
"""The step from which on the host runs ahead, and tells no states: it would wait for the device."""


@pytest.mark.parametrize(
    "fault",
    often(
        ["at=collective,n=1,how=sigstop", "at=collective,n=1", "at=optimizer,n=3,how=sigstop"],
        {"at=collective,n=1,how=sigstop"},
    ),
)
def test_a_death_while_the_host_runs_ahead_of_the_device(cluster, reference, fault, tmp_path):
    """Stopped rather than dead, a peer leaves the survivors' hosts the time to end the step that its loss voids."""
    violations = tmp_path / "violations"
    words = ("--layout", "ddp", "--steps", "14", "--quiet-from", str(AHEAD), "--die", f"rank=2,step=7,{fault}")
    env = {"FAKE_DEVICE": "ahead", VIOLATIONS_VARIABLE: str(violations)}
    job = cluster(*words, env=env, options=("--hang-timeout", "2"))
    told = {(rank, version): state for (rank, version), state in reference("ddp", 14).items()}
    job.check_repaired({where: told[where] for where in told if where[1] < AHEAD or where[1] == 14}, [2])
    assert not violations.exists(), violations.read_text(encoding="utf-8")


def test_updates_on_a_stream_that_only_the_next_step_waits_for(cluster, reference, tmp_path):
    """A snapshot that does not wait for it is torn, and the replacement and every survivor restore it."""
    violations = tmp_path / "violations"
    words = ("--layout", "ddp-side", "--steps", "12", "--quiet-from", str(AHEAD), "--die", "rank=2,step=8,at=before")
    env = {"FAKE_DEVICE": "ahead", VIOLATIONS_VARIABLE: str(violations)}
    job = cluster(*words, env=env)
    told = {(rank, version): state for (rank, version), state in reference("ddp-side", 12).items()}
    job.check_repaired({where: told[where] for where in told if where[1] < AHEAD or where[1] == 12}, [2])
    assert not violations.exists(), violations.read_text(encoding="utf-8")
