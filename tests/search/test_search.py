"""Tests of the random search: the jobs that it draws, and its judgement of weights."""

import dataclasses

import pytest
from draw import BREACHES, CARRIERS, ITEMS, KINDS, PLACES, WRAPS, Job, Strike, draw
from trial import judge_stop, run

SMALL = Job(
    seed=0,
    loop={
        "wrap": "ddp",
        "width": 8,
        "blocks": ["dropout", "norm"],
        "trains": "all",
        "optimizers": ["adam", "momentum"],
        "scheduler": "step",
        "scheduler_at": "between",
        "zero": "before",
        "to_none": False,
        "micro": 2,
        "data": "protected",
        "average": "between",
        "teacher": True,
        "metrics": "unprotected",
        "clip": True,
        "every": 1,
        "scaler": "",
        "between": ["metric", "broadcast"],
        "between_every": 2,
        "head": False,
        "ddp": {},
        "bucket_cap_mb": 0.01,
        "no_sync": True,
    },
    ranks=2,
    steps=7,
    spares=1,
    deaths=("rank=1,at=backward,how=sigsegv,step=4,n=0",),
)
"""A job with parts of most kinds. `make test` runs it, so that they keep working."""


def test_equal_seeds_give_equal_jobs():
    jobs = [draw(seed) for seed in range(300)]
    assert jobs == [draw(seed) for seed in range(300)]
    assert jobs == [Job.from_json(job.to_json()) for job in jobs]


def test_everything_is_drawn():
    jobs = [draw(seed) for seed in range(4000)]
    deaths = " ".join(death for job in jobs for death in job.deaths)
    assert {job.loop["item"] for job in jobs if "item" in job.loop} == set(ITEMS)
    assert {job.loop["wrap"] for job in jobs if "wrap" in job.loop} == set(WRAPS)
    assert {job.breach for job in jobs} == {"", *BREACHES}
    assert all(f"at={place}," in deaths for place in PLACES)
    assert all(f"how={kind}" in deaths for kind in KINDS)
    assert all(any(isinstance(strike, Strike) for strike in job.strikes) for job in jobs if not job.deaths)


def test_a_mesh_of_two_dimensions_is_drawn_for_ranks_that_fill_it():
    jobs = [draw(seed) for seed in range(2000)]
    assert {job.ranks for job in jobs if job.loop.get("wrap") in ("hsdp", "tp")} == {2, 4}


def test_no_pipeline_steps_its_optimizer_between_microbatches():
    jobs = [draw(seed) for seed in (*range(2000), 630685923938)]
    assert not [job.seed for job in jobs if job.loop.get("wrap") == "pp" and job.breach == "stepped-in-backward"]


@pytest.mark.timeout(300)
def test_a_job_with_parts_of_most_kinds_is_exact(tmp_path):
    verdict = run(SMALL, tmp_path / "exact")
    assert (verdict.outcome, verdict.happened) == ("exact", 1), verdict.words
    assert not (tmp_path / "exact").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_carrier_is_exact(tmp_path):
    loop = SMALL.loop | {"carries": list(CARRIERS), "carries_from": 2}
    verdict = run(dataclasses.replace(SMALL, loop=loop), tmp_path / "exact")
    assert (verdict.outcome, verdict.happened) == ("exact", 1), verdict.words


@pytest.mark.timeout(300)
def test_a_weight_that_is_wrong_in_its_last_bit_is_found(tmp_path):
    """No rank has a replica of a pipeline stage, so the library itself cannot notice the difference."""
    loop = SMALL.loop | {"wrap": "pp", "blocks": ["plain"], "teacher": False}
    planted = dataclasses.replace(SMALL, loop=loop, planted=True)
    verdict = run(planted, tmp_path / "wrong")
    assert verdict.outcome == "silently different", verdict.words
    assert Job.from_json((tmp_path / "wrong" / "job.json").read_text()) == planted
    assert "(pid" in (tmp_path / "wrong" / "verdict.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_loss_before_the_trial_of_a_loop_that_accumulates_gradients_is_repaired(tmp_path):
    """The survivor had updated its weights and began the trial. The replacement had not, and did not begin it."""
    job = dataclasses.replace(draw(730303248420), deaths=("rank=0,at=after,how=sigsegv,step=3",), strikes=())
    verdict = run(job, tmp_path / "lost")
    assert (verdict.outcome, verdict.happened) == ("exact", 1), verdict.words


SPENT = "rank 0 died (the world was started again 3 times; 3 are allowed)"


@pytest.mark.parametrize(
    ("breach", "code", "reason", "outcome"),
    [
        ("range", 94, "it loops without job.steps", "refused"),
        ("range", 94, "no", "was refused, but the text names no cause"),
        ("", 94, "no", "was refused (94), but the loop breaks no rule"),
        ("", 1, "", "stopped without a printed reason"),
        ("", 1, SPENT, "stopped"),
        ("", 1, "a bug in the script", "ended as a bug in the script"),
        ("swallows", 1, "the moon", "stopped for a reason that the draw does not explain"),
    ],
)
def test_a_stop_is_judged_by_its_text(breach, code, reason, outcome):
    assert judge_stop(breach, code, [reason], f"deadpool-run: stopping: {reason}") == outcome
    assert judge_stop(breach, code, [reason], "deadpool-run: stopping") == "stopped without a printed reason"
