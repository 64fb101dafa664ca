"""The parts of `deadpool-run check` by themselves."""

import json
import sys
from io import StringIO

import pytest
from rich.console import Console

from deadpool_run.agent.environment import base_environment
from deadpool_run.cli.check.compare import RunStates, StateDifference, in_words, split
from deadpool_run.cli.check.plan import FIRST_STEP, LEAST_STEPS, STEPS_AFTER, plan_faults
from deadpool_run.cli.check.report import CheckVerdict, Report, judge
from deadpool_run.cli.check.run import CheckRun
from deadpool_run.errors import ProtocolError, UsageError
from deadpool_run.wire import typed
from deadpool_run.wire.check import FAULT_FILE, VARIABLE, CheckPlan, Fault, FaultPhase
from deadpool_run.worker.check import probe

PHASES = set(FaultPhase)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 13])
def test_every_rank_is_killed_and_every_phase_is_met(ranks, seed):
    faults = plan_faults(ranks, 20, "", seed)
    assert len(faults) == max(ranks, len(PHASES))
    assert {fault.rank for fault in faults} == set(range(ranks))
    assert {fault.phase for fault in faults} == PHASES
    assert all(FIRST_STEP <= fault.step < 20 - STEPS_AFTER for fault in faults)
    assert len({fault.step for fault in faults}) > 1
    every = plan_faults(ranks, 20, "all", seed)
    assert len({(fault.rank, fault.phase) for fault in every}) == len(every) == ranks * len(PHASES)


def test_faults_are_the_same_for_the_same_seed_and_others_for_another():
    assert plan_faults(3, 20, "all", 1) == plan_faults(3, 20, "all", 1)
    assert plan_faults(3, 20, "all", 1) != plan_faults(3, 20, "all", 2)
    assert len(plan_faults(2, LEAST_STEPS, "1", 0)) == 1


@pytest.mark.parametrize(
    ("steps", "asked", "words"), [(LEAST_STEPS - 1, "", "too few"), (20, "0", "'0'"), (20, "many", "'many'")]
)
def test_what_cannot_be_planned_is_refused(steps, asked, words):
    with pytest.raises(UsageError, match=words):
        plan_faults(2, steps, asked, 0)


def test_a_plan_comes_through_the_environment():
    plan = CheckPlan(20, "/tmp/x", Fault(1, FaultPhase.CAPTURE, 5, 0.25))
    decoder = typed.Decoder(CheckPlan, "a plan")
    for each in (plan, CheckPlan(20, "/tmp/x")):
        assert decoder.decode(typed.to_json(each)) == each


def test_only_the_plan_of_a_check_is_handed_on_to_workers():
    env = base_environment(1, {VARIABLE: "plan", "DEADPOOL_SPARES": "3", "PET_X": "1", "HOME": "/h"})
    assert env[VARIABLE] == "plan"
    assert not {"DEADPOOL_SPARES", "PET_X"} & set(env)


def test_a_loop_without_a_check_is_the_jobs_own(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    loop = iter(())
    monkeypatch.delitem(sys.modules, "deadpool_run.worker.check.states", raising=False)
    assert probe.watched(None, 5, lambda _member, total: loop if total == 5 else None) is loop
    assert "deadpool_run.worker.check.states" not in sys.modules


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"steps": 5}'])
def test_a_variable_that_is_no_plan_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ProtocolError, match=VARIABLE):
        probe.watched(None, 5, lambda *_: iter(()))


def write(folder, worker, rank, *states, torn=""):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"version": version, "digests": digests}) + "\n" for version, digests in states]
    (folder / f"rank{rank}.{worker}.states.jsonl").write_text("".join(lines) + torn, encoding="utf-8")


def state(**kinds):
    return {"weights": {"w": "1"}, **kinds}


def found_in(tmp_path, *states, torn="", ignored=()):
    """Return what differs in these states from two versions that are the same."""
    write(tmp_path / "a", 0, 0, (0, state()), (1, state()), (2, state()))
    write(tmp_path / "b", 5, 0, *states, torn=torn)
    return RunStates(tmp_path / "b").differences(RunStates(tmp_path / "a"), ignored)


def test_equal_states_do_not_differ(tmp_path):
    assert found_in(tmp_path, (0, state()), (1, state()), (1, state()), (2, state())) == []


def test_a_difference_is_dated_by_its_first_version(tmp_path):
    other = state(weights={"w": "2"})
    assert found_in(tmp_path, (0, state()), (1, other), (2, other)) == [StateDifference(1, 0, "weights", "w")]


def test_each_look_at_a_version_counts(tmp_path):
    assert found_in(tmp_path, (1, state(weights={"w": "2"})), (1, state()), (2, state()))


def test_either_look_at_the_reference_will_do(tmp_path):
    """The library runs step 1 twice: what it does not put back differs there without harm."""
    write(tmp_path / "a", 0, 0, (1, state(gradients={"g": "1"})), (1, state(gradients={"g": "2"})), (2, state()))
    write(tmp_path / "b", 0, 0, (1, state(gradients={"g": "1"})), (1, state(gradients={"g": "3"})))
    reference = RunStates(tmp_path / "a")
    assert reference.differences(reference) == []
    assert RunStates(tmp_path / "b").differences(reference) == [StateDifference(1, 0, "gradients", "g")]


def test_the_line_of_a_writer_that_was_killed_is_passed_over(tmp_path):
    assert found_in(tmp_path, (1, state()), torn='{"version": 2, "digests": {"weights": {"w": "9') == []


def test_what_is_missing_counts_in_the_last_version(tmp_path):
    assert found_in(tmp_path, (1, {"weights": {}}), (2, state())) == []
    assert found_in(tmp_path, (2, {"weights": {}})) == [StateDifference(2, 0, "weights", "w")]
    assert found_in(tmp_path, (2, state(buffers={"b": "1"}))) == [StateDifference(2, 0, "buffers", "b")]


def test_a_plain_attribute_counts_in_the_last_version(tmp_path):
    one, other = state(attributes={"a": "1"}), state(attributes={"a": "2"})
    write(tmp_path / "a", 0, 0, (1, one), (2, one))
    write(tmp_path / "b", 0, 0, (1, other), (2, one))
    write(tmp_path / "c", 0, 0, (1, other), (2, other))
    reference = RunStates(tmp_path / "a")
    assert RunStates(tmp_path / "b").differences(reference) == []
    assert RunStates(tmp_path / "c").differences(reference) == [StateDifference(2, 0, "attributes", "a")]


def test_values_that_differ_without_a_fault_are_told_from_weights(tmp_path):
    found = [StateDifference(1, 0, "values", "clock"), StateDifference(1, 0, "weights", "w")]
    assert split(found) == ([found[1]], {("values", "clock")})
    assert found_in(tmp_path, (1, state(weights={"w": "2"})), ignored=[("weights", "w")]) == []


def test_the_first_differences_are_put_in_words():
    found = [StateDifference(6, rank, "weights", name) for rank in (0, 1) for name in "abcd"]
    found.append(StateDifference(7, 0, "optimizer", "a/exp_avg"))
    assert in_words(found) == "from step 6: weights a, b, c and 1 more (ranks 0, 1), later 1 more"
    assert in_words([]) == ""


def test_weights_that_ranks_let_differ_are_told_from_those_that_always_do(tmp_path):
    """A sharded weight is never equal; of others, the first version counts in which it is not equal any more."""
    for rank in range(2):
        states = [
            (at, {"weights": {"w": str(at), "shard": f"{rank}", "late": f"{rank if at > 2 else 0}"}}) for at in range(5)
        ]
        write(tmp_path / "a", rank, rank, *states)
    assert RunStates(tmp_path / "a").diverging() == (3, ("late",))
    assert RunStates(tmp_path / "none").diverging() is None


@pytest.mark.parametrize(("last", "verdict"), [(4, CheckVerdict.STOPPED), (3, CheckVerdict.DIFFERENT)])
def test_replicas_that_differ_without_a_fault_too_are_no_difference(tmp_path, last, verdict):
    """Nor are they exact. A job that stops before the version in which the script lets them differ has another reason."""
    for rank in range(2):
        states = [(at, state(weights={"w": f"{rank if at >= 5 else 0}"})) for at in range(9)]
        write(tmp_path / "reference", rank, rank, *states)
        write(tmp_path / "states", rank, rank, *states[: last + 1])
    (tmp_path / "states" / FAULT_FILE).write_text('{"met": true}', encoding="utf-8")
    run = CheckRun(tmp_path, Fault(0, FaultPhase.FORWARD, 2, 0.0), 95, "replicas differ", 1.0)
    row = judge(run, RunStates(run.states), RunStates(tmp_path / "reference"), Report(8, ranks=2))
    assert row.verdict is verdict
    assert ("by itself: without a fault, w differ between ranks from step 5 on" in row.why) == (last == 4)


@pytest.mark.parametrize(
    ("exit_code", "fault", "last", "verdict"),
    [
        (0, '{"met": true}', "1", CheckVerdict.EXACT),
        (0, '{"met": true}', "2", CheckVerdict.DIFFERENT),
        (0, '{"met": true}', None, CheckVerdict.STOPPED),
        (0, None, "1", CheckVerdict.STOPPED),
        (94, '{"met": true}', "1", CheckVerdict.REFUSED),
        (95, '{"met": true}', "1", CheckVerdict.DIFFERENT),
        (1, '{"met": true}', "1", CheckVerdict.STOPPED),
        (None, '{"met": true}', "1", CheckVerdict.STOPPED),
    ],
)
def test_the_verdict_on_a_run(tmp_path, exit_code, fault, last, verdict):
    write(tmp_path / "reference", 0, 0, (0, state()), (8, state()))
    write(tmp_path / "states", 0, 0, (0, state()), *([] if last is None else [(8, {"weights": {"w": last}})]))
    if fault:
        (tmp_path / "states" / FAULT_FILE).write_text(fault, encoding="utf-8")
    run = CheckRun(tmp_path, Fault(0, FaultPhase.FORWARD, 4, 0.0), exit_code, "" if exit_code == 0 else "because", 1.0)
    report = Report(8, ranks=1)
    report.rows.append(judge(run, RunStates(run.states), RunStates(tmp_path / "reference"), report))
    (row,) = report.rows
    assert row.verdict is verdict
    assert report.exact == (verdict is CheckVerdict.EXACT)
    assert (row.why or row.differences) or row.verdict is CheckVerdict.EXACT
    assert json.loads(report.to_json())["runs"][0]["result"] == verdict.value
    out = StringIO()
    report.show(Console(file=out, width=100))
    assert verdict.value in out.getvalue()
    assert f"{int(report.exact)} of 1 exact, over 8 steps and 1 rank\n" in out.getvalue()


@pytest.mark.parametrize(("version", "names_files"), [(0, True), (3, False)])
def test_a_script_whose_setup_differs_may_resume_from_its_own_files(version, names_files):
    report = Report(8, ranks=1, irreproducible=[StateDifference(version, 0, "weights", "w")])
    said = report.conclusion()
    assert f"differ from step {version}: weights w (rank 0)\n" in said
    assert ("DEADPOOL_CHECK" in said) == names_files
