"""PyTorch's own tests of torch.distributed give on backend "deadpool" what they give on plain Gloo, but for a written list.

They run in a fresh world each, and on groups that were attached again after the loss of a rank.

WRITE_DOCS=1 pytest tests/worker/groups/test_torch_suite.py      # writes the list into docs/collectives.md
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch_suite

PAGE = Path(__file__).resolve().parents[3] / "docs" / "collectives.md"
BEGIN, END = "<!-- made by tests/worker/groups/test_torch_suite.py -->\n", "<!-- end of PyTorch's own tests -->\n"


@dataclass(frozen=True)
class Difference:
    """A test that ends otherwise on our backend, on purpose: on these ranks, with this error."""

    test: str
    error: str
    ranks: dict[int, tuple[int, ...]]
    reason: str


INTENDED = (
    Difference(
        "test_barrier_timeout_full_group",
        "AssertionError: Exception not raised",
        {2: (0,), 4: (0,)},
        "It expects `barrier` to raise when a peer does not come in time. We take a timeout for the loss of that peer: "
        "the step is repeated.",
    ),
    Difference(
        "test_ddp_logging_data_cpu",
        "AssertionError: String comparison failed: 'deadpool' != 'gloo'",
        {2: (0, 1), 4: (0, 1, 2, 3)},
        "It expects DDP's logging data to name the backend as `get_backend()` does. DDP asks the group in C++, whose "
        "backend is `deadpool`. Nothing depends on it.",
    ),
    Difference(
        "test_monitored_barrier_gloo",
        "AssertionError: RuntimeError not raised",
        {4: (2, 3)},
        "It expects every rank to raise when one of them is late. We raise on rank 0, which names the late rank. To the "
        "others a broken connection to rank 0 is the loss of a peer.",
    ),
)


def differences(gloo, deadpool):
    """Return what differs: (test, rank) to both outcomes."""
    return {
        (test, rank): (outcome, ours[test])
        for rank, (theirs, ours) in enumerate(zip(gloo, deadpool, strict=True))
        for test, outcome in theirs.items()
        if outcome != ours[test]
    }


def check(gloo, deadpool, size):
    intended = {(each.test, rank): each.error for each in INTENDED for rank in each.ranks.get(size, ())}
    found = differences(gloo, deadpool)
    unknown = {where: both for where, both in found.items() if where not in intended}
    assert not unknown, "\n".join(
        f"{test}, rank {rank}: {theirs} on Gloo, {ours} on deadpool\n{ours.trace}"
        for (test, rank), (theirs, ours) in unknown.items()
    )
    assert intended.keys() == found.keys(), "a difference on the list is none any more: take it off"
    for where, error in intended.items():
        assert error in found[where][1].trace, where


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 4])
def test_torchs_own_tests_end_as_on_gloo(make_world, tmp_path, size):
    gloo = torch_suite.fresh(make_world(size), "gloo", tmp_path / "gloo")
    passed = [test for test, outcome in gloo[0].items() if outcome.kind == "passes"]
    assert len(passed) > 80, gloo[0]
    check(gloo, torch_suite.fresh(make_world(size), "deadpool", tmp_path / "fresh"), size)
    check(gloo, torch_suite.attached_again(make_world(size), tmp_path / "again"), size)


def test_the_page_has_the_list():
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [
        f"| `{each.test}` | {' and '.join(map(str, each.ranks))} | `{each.error}` | {each.reason} |\n"
        for each in INTENDED
    ]
    fresh = "".join(
        [
            before,
            BEGIN,
            "\n| test | ranks | on `deadpool` | why |\n| --- | --- | --- | --- |\n",
            *rows,
            "\n",
            END,
            after,
        ]
    )
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(fresh, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == fresh, "run this file with WRITE_DOCS=1"
