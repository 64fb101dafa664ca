"""A rehearsal counts only if it has made what set-up and the first steps made."""

import tempfile

import pytest
import torch

from deadpool_run.errors import RehearsalError
from deadpool_run.worker.transcript.rehearsal import Rehearsal
from deadpool_run.worker.transcript.transcript import Transcript


def recorded():
    """Return the transcript of steps in which one optimizer has stepped, and one DDP has decided its buckets."""
    transcript = Transcript()
    for name, tensor in (("broadcast", torch.arange(3)), ("allreduce", torch.zeros(5000))):
        transcript.fill(transcript.reserve("0", name, [tensor]), [tensor])
    first = Rehearsal()
    first.optimizers.add("optimizer")
    first.buckets = [True]
    with tempfile.TemporaryFile() as file:
        first.store(transcript, file.fileno())
    return Transcript.from_bytes(transcript.to_bytes())


def rehearsed(calls, *, stepped=True, decided=True, raised=None):
    transcript = recorded()
    for name, tensor in calls:
        transcript.play("0", name, [tensor])
    rehearsal = Rehearsal()
    if stepped:
        rehearsal.optimizers.add("optimizer")
    rehearsal.buckets = [decided]
    if raised is not None:
        rehearsal.raised(raised)
    rehearsal.check(transcript)


WHOLE = [("broadcast", torch.zeros(3, dtype=torch.int64)), ("allreduce", torch.zeros(5000))]


def test_a_whole_rehearsal_counts_even_if_it_raised_something():
    rehearsed(WHOLE, raised=ValueError("the loss is zero"))


def test_data_may_have_another_shape():
    rehearsed([WHOLE[0], ("allreduce", torch.zeros(7000))])


@pytest.mark.parametrize(
    ("calls", "options", "said"),
    [
        (WHOLE, {"stepped": False}, "'optimizer' did not step"),
        (WHOLE, {"decided": False}, "DDP has not decided its buckets"),
        (WHOLE[:1], {}, "1 collectives were not called"),
        (WHOLE[1:], {}, r"allreduce of \[5000\] float32 where broadcast of \[3\] int64 was recorded"),
        ([("broadcast", torch.zeros(4, dtype=torch.int64)), WHOLE[1]], {}, r"broadcast of \[4\] int64 where broadcast"),
        ([*WHOLE, WHOLE[0]], {}, "where nothing was recorded"),
        (WHOLE, {"stepped": False, "raised": ValueError("no batch")}, "It raised ValueError: no batch"),
    ],
)
def test_what_is_missing_is_named(calls, options, said):
    with pytest.raises(RehearsalError, match=said):
        rehearsed(calls, **options)
