"""A job over several hosts that was lost with all its memory goes on from its durable checkpoint, to the last bit."""

import pytest

STEPS = 30
STEP = ("--least-ms", "100")


def durable(place, *more, every="4"):
    return ("--durable", str(place), "--durable-every", every, *more)


def after(states, first):
    return {at: digest for at, digest in states.items() if at[1] >= first}


def newest(place):
    return max((int(path.name.split("-")[1]) for path in place.iterdir() if path.suffix == ""), default=-1)


def test_a_job_that_ends_leaves_its_last_step(fleet, reference, tmp_path):
    place = tmp_path / "kept"
    job = fleet("--layout", "fsdp", "--steps", "12", *STEP, options=durable(place))
    job.check_repaired(reference("fsdp", 12), [], [0, 1, 2, 3])
    assert newest(place) == 12
    assert len(list(place.iterdir())) == 2
