"""Backend "deadpool" against "gloo": the same values and the same errors, for every collective there is.

WRITE_DOCS=1 pytest tests/worker/groups/test_collectives_differential.py      # writes the tables of docs/collectives.md anew
"""

import gc
import os
import re
import weakref
from datetime import timedelta
from pathlib import Path

import collective_docs as docs
import collective_errors
import collective_matrix
import collective_tensors
import collective_ways
import pytest
import torch
import torch.distributed as dist
from collective_kit import CASES, outcome

from deadpool_run.worker.groups.registry import GroupState

WITH_CASES = (collective_ways, collective_tensors, collective_errors)
LIMIT = timedelta(seconds=15)
ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "collectives.md"
PINNED = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]
"""The version of torch that the page is about; what others give differs here and there, as Gloo's does."""


def perform(member, backend):
    """Outcome of each named case, of the matrix, and which cases left the registry as if a peer had been lost."""
    member.start(backend=backend, timeout=LIMIT)
    found, spoilt = {}, []
    # Mistakes last: a barrier of Gloo's raises again what works of before have raised.
    for number, case in enumerate(sorted(CASES, key=lambda case: case.section == "errors")):
        found[case.section, case.name] = outcome(lambda: case.run(member.rank, member.size))  # noqa: B023
        if member.registry.step_failed or member.failures:
            spoilt.append(case.name)
            member.registry.begin_step()
        member.meet(f"case {number}")
    matrix = collective_matrix.outcomes(member.rank, member.size)
    if backend == "deadpool":
        assert spoilt == []
        assert member.registry.state is GroupState.ATTACHED
        assert member.failures == []
        assert not member.registry.step_failed
    return found, matrix


def differences(gloo, deadpool):
    return {
        (rank, key): (of_rank[key], deadpool[rank][key])
        for rank, of_rank in enumerate(gloo)
        for key in of_rank
        if of_rank[key] != deadpool[rank][key] and key not in docs.INTENDED
    }


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_deadpool_gives_what_gloo_gives(make_world, size):
    (gloo, gloo_matrix), (deadpool, matrix) = (
        zip(*make_world(size).run(perform, backend), strict=True) for backend in ("gloo", "deadpool")
    )
    assert differences(gloo, deadpool) == {}
    assert differences(gloo_matrix, matrix) == {}
    for key in docs.INTENDED:
        assert gloo[0][key] != deadpool[0][key], f"{key} is no difference any more"
    if size == 2 and torch.__version__.partition("+")[0] == PINNED:
        page = PAGE.read_text(encoding="utf-8")
        fresh = docs.put_tables(page, gloo[0], deadpool[0], gloo_matrix[0], matrix[0])
        if os.environ.get("WRITE_DOCS"):
            PAGE.write_text(fresh, encoding="utf-8")
        assert PAGE.read_text(encoding="utf-8") == fresh, "run this file with WRITE_DOCS=1"


def raises_and_forgets(member):
    """Without the garbage collector, which a script may have turned off: what has raised must be gone at once."""
    member.start(timeout=LIMIT)
    gc.disable()
    gone = []
    for attempt in (
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND, async_op=True),
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4), op=dist.ReduceOp.BAND, async_op=True),
    ):
        work = attempt()
        reference = weakref.ref(work)
        with pytest.raises(RuntimeError, match="BAND") as raised:
            work.wait()
        del work, raised
        gone.append(reference() is None)
    return gone


def test_a_work_that_has_raised_is_freed_at_once(make_world):
    """A barrier of Gloo's waits for every work that is left, and would raise its error again."""
    assert make_world(2).run(raises_and_forgets) == [[True, True]] * 2
