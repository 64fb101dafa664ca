"""A job over several hosts that was lost with all its memory goes on from its durable checkpoint, to the last bit."""

import signal

import pytest

STEPS = 30
STEP = ("--least-ms", "100")


def durable(place, *more, every="4"):
    return ("--durable", str(place), "--durable-every", every, *more)


def after(states, first):
    return {at: digest for at, digest in states.items() if at[1] >= first}


def newest(place):
    found = place.iterdir() if place.is_dir() else ()
    return max((int(path.name.removeprefix("step-")) for path in found if not path.suffix), default=-1)


def test_a_job_that_ends_leaves_its_last_step(fleet, reference, tmp_path):
    place = tmp_path / "kept"
    job = fleet("--layout", "fsdp", "--steps", "12", *STEP, options=durable(place))
    job.check_repaired(reference("fsdp", 12), [], [0, 1, 2, 3])
    assert newest(place) == 12
    assert len(list(place.iterdir())) == 2


def test_a_job_that_lost_every_host_is_started_again(fleet, reference, tmp_path):
    place = tmp_path / "kept"
    job = fleet("--layout", "fsdp", "--steps", str(STEPS), *STEP, hosts=3, spares="0", options=durable(place))
    job.wait_until(lambda: newest(place) >= 8, "version 8 on the disk")
    for host in range(3):
        job.power_off(host)
    job.wait_exit([0, 1, 2])
    first = newest(place)
    again = fleet("--layout", "fsdp", "--steps", str(STEPS), hosts=3, spares="0", options=durable(place))
    again.check_repaired(after(reference("fsdp", STEPS), first), [], [0, 1, 2])
    assert min(version for _, version in again.account.states()) == first
    assert f"resuming at step {first}" in again.agents[0].output
    assert newest(place) == STEPS


def test_a_rank_and_all_who_hold_its_state_are_lost_and_other_hosts_come(fleet, reference, tmp_path):
    """The owner and the buddy at once: the one host that is left waits for others, and all go on from the disk."""
    place = tmp_path / "kept"
    job = fleet("--layout", "fsdp", "--steps", str(STEPS), *STEP, hosts=3, spares="0", options=durable(place))
    job.wait_until(lambda: newest(place) >= 8, "version 8 on the disk")
    job.power_off(1)
    job.power_off(2)
    job.wait_output(0, "starting the world again from the newest durable checkpoint")
    begun = len(job.events)
    first = newest(place)
    job.agents += [job.start(1), job.start(3)]
    assert job.wait_exit([0, 3, 4]) == [0, 0, 0], job.told()
    states = job.account.states()
    assert {at: states[at] for at in reference("fsdp", STEPS)} == reference("fsdp", STEPS)
    assert min(e["version"] for e in job.events[begun:] if e["kind"] == "state") == first


@pytest.mark.parametrize("told", ["the coordinator's", "another"])
def test_an_end_that_is_foretold_to_any_host(fleet, reference, tmp_path, told):
    place = tmp_path / "kept"
    options = durable(place, every="60m")
    job = fleet("--layout", "fsdp", "--steps", str(STEPS), *STEP, options=options)
    for rank in range(6):
        job.wait_state(rank, 5)
    job.agents[0 if told == "the coordinator's" else 2].process.send_signal(signal.SIGUSR1)
    assert job.wait_exit([0, 1, 2, 3]) == [75] * 4
    first = newest(place)
    assert first >= 4
    again = fleet("--layout", "fsdp", "--steps", str(STEPS), options=options)
    again.check_repaired(after(reference("fsdp", STEPS), first), [], [0, 1, 2, 3])
