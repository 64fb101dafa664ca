"""An incident is reported in one line."""

from msgspec.structs import replace

from deadpool_run.agent.records.incident_line import incident_fields, incident_line, short_line
from deadpool_run.core.effects import Incident, Loss
from deadpool_run.ids import Epoch, Rank, Version, WorkerId

LOSS = Loss(Rank(1), WorkerId(1), "killed by SIGKILL", True, WorkerId(4), True)
INCIDENT = Incident(
    epoch=Epoch(2),
    losses=(LOSS,),
    resumed=Version(57),
    steps_repeated=0,
    detected_s=0.002,
    aborted_s=0.032,
    promoted_s=0.001,
    rehearsed_s=0.152,
    restored_s=0.172,
    attached_s=0.181,
    first_step_s=0.241,
)


def test_an_incident_is_one_line_whose_parts_sum_up():
    assert incident_line(INCIDENT) == (
        "rank 1 (killed by SIGKILL, injected) goes from worker 1 to spare worker 4: detected 2 ms, promoted 1, "
        "aborted 31, rehearsed 120, restored 20, attached 9, first step 60, total 243 ms; "
        "resumed at step 57, 0 steps repeated"
    )


def test_a_planned_move_is_no_recovery():
    moved = replace(LOSS, cause="was drained", injected=False, planned=True)
    line = short_line(replace(INCIDENT, losses=(moved,), detected_s=None))
    assert line == "moved rank 1 to spare worker 4 in 0.24 s, after step 57; no step repeated"
    with_a_loss = replace(INCIDENT, losses=(moved, LOSS))
    assert short_line(with_a_loss).startswith("recovered ")


def test_programs_can_tell_a_planned_move_from_a_loss():
    moved = replace(LOSS, cause="was drained", injected=False, planned=True)
    assert incident_fields(replace(INCIDENT, losses=(moved,)))["planned"] is True
    assert incident_fields(INCIDENT)["planned"] is False
    assert incident_fields(replace(INCIDENT, losses=(moved, LOSS)))["planned"] is False


def test_a_rank_that_was_lost_again_in_the_repair_is_named_once():
    again = replace(LOSS, worker=WorkerId(4), injected=False, replacement=WorkerId(5))
    line = short_line(replace(INCIDENT, losses=(LOSS, again)))
    assert line.startswith("recovered rank 1, lost 2 times, on spare worker 5 in 0.24 s; ")


def test_an_incident_of_two_losses_that_nobody_injected():
    other = replace(LOSS, rank=Rank(2), cause="exited with code 1", injected=False, from_spare=False)
    line = incident_line(replace(INCIDENT, losses=(LOSS, other), detected_s=None, steps_repeated=1))
    assert "; rank 2 (exited with code 1) goes from worker 1 to fresh worker 4: promoted 1 ms, aborted 31," in line
    assert line.endswith("total 241 ms; resumed at step 57, 1 step repeated")
