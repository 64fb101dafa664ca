"""One job with many kinds of state, each of which has an effect only later: what a snapshot lacks is named here by its kind."""

import sys
from pathlib import Path

import pytest
from kit.choice import often
from kit.cluster import Cluster

LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DEATHS = {
    "after the changes, in rank 0": ("rank=0,step=5,at=after",),
    "none": (),
    "before them": ("rank=1,step=5,at=before",),
    "after the step, and again": ("rank=1,step=4,at=between", "rank=0,step=6,at=before"),
}
Weights = dict[int, dict[str, float]]


@pytest.fixture
def weights(cluster, tmp_path):
    """Run the job, and return the weights of all kinds by rank, at its end, with the number of deaths."""

    def run(parallel: str, deaths: tuple[str, ...] = (), launcher: tuple[str, ...] = ()) -> tuple[Weights, int]:
        words = [word for death in deaths for word in ("--die", death)]
        words = ["--parallel", parallel, "--flags", str(tmp_path), *words]
        job: Cluster = cluster(*words, script=Path("many_kinds.py"), nproc=2, spares=len(deaths), launcher=launcher)
        assert job.wait_exit() == 0, job.told()
        return {event["rank"]: event["of_kinds"] for event in job.account.of("weights")}, len(job.account.of("dying"))

    return run


@pytest.mark.timeout(240)
@pytest.mark.parametrize("deaths", often(DEATHS, {"none", "after the changes, in rank 0"}))
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_kind_is_as_under_torchrun(weights, parallel, deaths):
    expected, _ = weights(parallel, launcher=LAUNCHER)
    found, died = weights(parallel, DEATHS[deaths])
    assert died == len(DEATHS[deaths])
    different = {rank: [name for name in kinds if kinds[name] != expected[rank][name]] for rank, kinds in found.items()}
    assert different == {0: [], 1: []}
    assert len(expected[0]) > 40
