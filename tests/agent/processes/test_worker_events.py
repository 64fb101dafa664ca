"""Messages become facts, and an incident one line."""

import typing

import pytest
from msgspec.structs import asdict, replace

from deadpool_run.agent.processes.worker_events import to_event
from deadpool_run.agent.records.incident_line import incident_line
from deadpool_run.core.effects import Incident, Loss
from deadpool_run.core.events import SurvivorDrained
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Epoch, Rank, Version, WorkerId
from deadpool_run.wire import messages

WORKER = WorkerId(7)
SAMPLES = {"epoch": 3, "completed": 5, "live": None, "captured": [4, 5], "version": 6, "step": None, "blame": "script"}


@pytest.mark.parametrize("kind", typing.get_args(messages.FromWorker))
def test_every_message_of_a_worker_is_a_fact_about_it(kind):
    message = kind(**{name: SAMPLES.get(name, "text") for name in kind.__struct_fields__})
    if kind in (messages.StoreListening, messages.Captured):  # the store's; the agent's own business
        with pytest.raises(ProtocolError, match=kind.__name__):
            to_event(WORKER, message)
        return
    event = to_event(WORKER, message)
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in asdict(message).items()}
    assert asdict(event) == {"worker": WORKER, **fields}


def test_a_drained_survivor_keeps_its_versions():
    event = to_event(WORKER, messages.Drained(3, 5, 5, [4, 5]))
    assert event == SurvivorDrained(WORKER, Epoch(3), Version(5), Version(5), (Version(4), Version(5)))


@pytest.mark.parametrize("kind", typing.get_args(messages.ToWorker))
def test_orders_are_no_facts(kind):
    order = kind(*([None] * len(kind.__struct_fields__)))
    with pytest.raises(ProtocolError):
        to_event(WORKER, order)


LOSS = Loss(Rank(1), WorkerId(1), "killed by SIGKILL", True, WorkerId(4), True)
INCIDENT = Incident(
    epoch=Epoch(2),
    losses=(LOSS,),
    resumed=Version(57),
    steps_repeated=0,
    detected_s=0.002,
    drained_s=0.032,
    promoted_s=0.001,
    rehearsed_s=0.152,
    restored_s=0.172,
    attached_s=0.181,
    first_step_s=0.241,
)


def test_an_incident_is_one_line_whose_parts_sum_up():
    assert incident_line(INCIDENT) == (
        "rank 1 (killed by SIGKILL, injected) goes from worker 1 to spare worker 4: detected 2 ms, promoted 1, "
        "drained 31, rehearsed 120, restored 20, attached 9, first step 60, total 243 ms; "
        "resumed at step 57, 0 steps repeated"
    )


def test_an_incident_of_two_losses_that_nobody_injected():
    other = replace(LOSS, rank=Rank(2), cause="exited with code 1", injected=False, from_spare=False)
    line = incident_line(replace(INCIDENT, losses=(LOSS, other), detected_s=None, steps_repeated=1))
    assert "; rank 2 (exited with code 1) goes from worker 1 to fresh worker 4: promoted 1 ms, drained 31," in line
    assert line.endswith("total 241 ms; resumed at step 57, 1 step repeated")
