"""Loops that cannot be exact are refused at every start, before the second update and before any loss."""

from pathlib import Path
from re import findall

import pytest
from kit.cluster import Cluster

SCRIPT = Path(__file__).parent / "scripts" / "breaches.py"
NAMES = findall(r'^@breach\("(.+)"\)$', SCRIPT.read_text(encoding="utf-8"), flags=8)
REFUSED = 94
IN_CLOSURE = "(in the closure of main().step_of)"
CARRIED = "is carried from step to step, and snapshots do not keep it: it is larger than 64 MiB"
CHANGED = "which the step changes and no snapshot holds"
SAID = {
    "nothing is protected": "the optimizer 'optimizer' (Adam) updated weights in step 0, but is not protected",
    "the optimizer is not protected": "job.protect(optimizer=optimizer)",
    "the optimizer is not protected, and first steps in step 1": "the optimizer 'second' (Adam) updated weights in step 1",
    "the model under DDP is not protected": "job.protect(model=model)",
    "the model under FSDP2 is not protected": "job.protect(model=model)",
    "a scheduler is not protected": "the scheduler 'scheduler' (StepLR) is not protected",
    "a GradScaler is not protected": "the scaler 'scaler' (GradScaler) is not protected",
    "an average of the weights is not protected": "the module 'average' (AveragedModel) is not protected",
    "a large average of the weights is kept by hand": f"average.shadow.module.weight {IN_CLOSURE} {CARRIED}",
    "a large batch is fetched in the step before, as nanoGPT does": f"batch {IN_CLOSURE} {CARRIED}",
    "a module keeps a large mean in a plain attribute": f"model.mean {CARRIED}",
    "a large buffer is filled from the first step, and sampled later": f"ring.rows {IN_CLOSURE} {CARRIED}",
    "losses of several steps are summed, for one backward": "a backward goes through the graph of an earlier step",
    "enumerate() counts the steps, for later": f"number {IN_CLOSURE} was 1 in the first run and 2 in the second",
    "a tensor is trained by hand, and not protected": "the tensor 'scale' of shape (8,)",
    "a count that a generator keeps sets the learning rate": f"counts {IN_CLOSURE} (generator), {CHANGED}",
    "the step is drawn by a generator function": f"inputs {IN_CLOSURE} (generator), {CHANGED}",
    "an average of a library, beside a file, scales the loss": f"meter {IN_CLOSURE} (Meter), {CHANGED}",
    "a collective is waited for in the next step": "allreduce: this collective was issued in an earlier step",
}
"""A part of each refusal. The trial of the first updating step after step 0 finds all other breaches."""
BY_TRIAL = "was run twice from the same state and gave different results"


@pytest.mark.parametrize("name", NAMES)
def test_a_breach_is_refused_before_step_2(name, cluster, record_property):
    job: Cluster = cluster(name, script=SCRIPT, nproc=2, spares=1)
    code = job.wait_exit()
    assert code == REFUSED, job.told()
    assert SAID.get(name, BY_TRIAL) in " ".join(job.stderr.split()), job.told()
    last = max(event["index"] for event in job.account.of("step"))
    assert last == 2 if "accumulated over three steps" in name else last < 2
    assert not job.account.of("end")
    said = job.stderr.partition("stopping the job:")[2].strip().splitlines()[0].split(". ")[0]
    found = {"breach": name, "place": NAMES.index(name), "step": last, "said": said.replace("|", "/")}
    for key, value in found.items():
        record_property(key, value)
