"""Durable checkpoints: the leader's orders, one node's part in them, and one machine as a cluster of one."""

import asyncio
from contextlib import closing
from types import SimpleNamespace

import pytest

from deadpool_run.agent.checkpoint import leader, schedule
from deadpool_run.agent.checkpoint.leader import CheckpointLeader
from deadpool_run.agent.checkpoint.participant import CheckpointParticipant
from deadpool_run.core.members import Seat
from deadpool_run.core.state import JobEnd, State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.errors import ReplicasDifferError
from deadpool_run.ids import Rank
from deadpool_run.vault.checkpoint_format import CheckpointStep
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.vault.vault import Vault
from deadpool_run.wire import peers
from deadpool_run.wire.checkpoints import (
    CheckpointFailed,
    CheckpointLoaded,
    DurableSpec,
    FillSlots,
    StepTaken,
    TakeStep,
)

HOMES = {"a": (0, 1), "b": (2,), "spare": ()}
STEPS = [step.value for step in CheckpointStep]


class Checkpointers:
    """Processes that answer when the test says so."""

    def __init__(self):
        self.asked, self.killed = [], 0

    def start(self, ranks, heard):
        self.ranks, self.heard = tuple(ranks), heard
        return SimpleNamespace(ask=self.asked.append, let_go=lambda: None, kill=self.kill)

    def kill(self):
        self.killed += 1


class Job:
    """A job whose coordinator is on the spare node, with all that its checkpoints' leader does recorded."""

    def __init__(self, vault, known=None, *, homes=HOMES, here="spare", alone=False, **spec):
        self.here, self.alone = here, alone
        seats = tuple(Seat(Rank(rank), node=node) for node, ranks in homes.items() for rank in ranks)
        self.state = State(JobPhase.RUNNING, 1, seats, nodes=dict.fromkeys(homes))
        self.told, self.said, self.left, self.published, self.lost = [], [], 0, [], []
        self.print_line, self.tell_all, self.cannot_begin = self.said.append, self.published.append, self.lost.append
        self.vault, self.checkpointers = vault, Checkpointers()
        self.leader = CheckpointLeader(
            DurableSpec(**({"target": "/kept", "every_steps": 4} | spec)),
            run="run",
            checkpointers=self.checkpointers,
            vault=vault,
            job=self,
            newest=known,
        )

    def tell_node(self, node, message):
        self.told.append((node, message))

    def leave(self):
        self.left += 1

    def commit(self, version):
        self.vault.status_page.publish(version, ())
        self.leader.check()

    def news(self):
        told, self.told = self.told, []
        return told

    def take(self, failing=None, uncleaned=()):
        """Have every node that was told take its step; return which step that was, and who had a part in it."""
        told = [(node, message) for node, message in self.news() if isinstance(message, TakeStep)]
        (step,) = {message.step for _, message in told}
        for node, message in told:
            taken = StepTaken(step, "/kept/it" if step == "complete" else "", 1000, uncleaned)
            answer = CheckpointFailed("no space") if node == failing else taken
            self.leader.saved(node, peers.Saved(message.attempt, answer))
        return step, {node for node, _ in told}


@pytest.fixture
def vault():
    with closing(Vault(3)) as made:
        yield made


def in_loop(test):
    def run(vault):
        async def body():
            test(vault)

        asyncio.run(body())

    return run


@in_loop
def test_every_node_takes_every_step_before_the_next(vault):
    job = Job(vault)
    job.commit(3)
    assert not job.news()
    job.commit(4)
    seen = [job.take() for _ in STEPS]
    assert [step for step, _ in seen] == STEPS
    both, all_, leader = {"a", "b"}, {"a", "b", "spare"}, {"spare"}
    assert [who for _, who in seen] == [all_, all_, both, both, both, leader]
    assert [message.version for message in job.published] == [4]
    assert not job.news()


@in_loop
def test_the_version_is_the_newest_when_all_are_ready_to_copy_it(vault):
    job = Job(vault)
    job.commit(4)
    vault.status_page.publish(6, ())
    job.take()
    orders = dict(job.told)
    assert {order.version for order in orders.values()} == {6}
    assert {node: (order.ranks, order.leads) for node, order in orders.items()} == {
        "a": ((0, 1), False),
        "b": ((2,), False),
        "spare": ((), True),
    }
    assert {order.firsts for order in orders.values()} == {(0, 2)}


@in_loop
def test_a_step_is_not_begun_while_one_node_has_not_taken_the_last(vault):
    job = Job(vault)
    job.commit(4)
    (_, first), (_, second), _ = job.news()
    job.leader.saved("a", peers.Saved(first.attempt, StepTaken("prepare", "", 0)))
    job.leader.saved("a", peers.Saved(first.attempt, StepTaken("prepare", "", 0)))
    job.leader.saved("b", peers.Saved("another", StepTaken("prepare", "", 0)))
    job.leader.saved("b", peers.Saved(second.attempt, StepTaken("prepare", "", 0)))
    assert not job.news()


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_a_node_that_is_lost_makes_it_void_and_the_next_has_a_later_version(vault, at):
    @in_loop
    def check(vault):
        job = Job(vault)
        job.commit(4)
        for _ in range(at):
            job.take()
        job.news()
        job.leader.node_lost("b")
        assert {node for node, message in job.news() if isinstance(message, peers.Void)} == set(HOMES)
        job.state = State(JobPhase.REPAIRING, 1, job.state.seats, nodes=dict.fromkeys(HOMES))
        job.commit(5)
        assert not job.news()
        job.state = State(JobPhase.RUNNING, 1, job.state.seats, nodes=dict.fromkeys(HOMES))
        job.commit(6)
        for _ in STEPS:
            job.take()
        assert [message.version for message in job.published] == [6]

    check(vault)


@in_loop
def test_a_roll_back_voids_what_was_not_copied_yet_and_nothing_else(vault):
    job = Job(vault)
    job.commit(4)
    job.take()
    job.leader.new_timeline()
    assert {type(message) for _, message in job.news()} == {TakeStep, peers.Void}
    job.commit(4)
    job.take(), job.take()
    job.leader.new_timeline()
    assert job.take()[0] == "survey"


def begins(job, version):
    """Commit a version; return whether that begins an attempt."""
    job.commit(version)
    return bool(job.news())


@pytest.mark.parametrize("copied", [True, False])
def test_after_a_failure_the_next_is_due_as_many_steps_later(vault, copied, monkeypatch):
    monkeypatch.setattr(schedule, "_PAUSE_S", 0.0)

    @in_loop
    def check(vault):
        job = Job(vault)
        job.commit(4)
        vault.status_page.publish(5, ())
        if copied:
            job.take(), job.take()
        vault.status_page.publish(6, ())
        job.take(failing="b")
        job.news()
        due = 9 if copied else 10  # the failed attempt had version 5, or none yet
        assert not any(begins(job, version) for version in range(6, due))
        assert begins(job, due)

    check(vault)


def test_after_a_failure_there_is_a_pause_however_short_the_steps_are(vault, monkeypatch):
    monkeypatch.setattr(schedule, "_PAUSE_S", 3600.0)

    @in_loop
    def check(vault):
        job = Job(vault)
        job.commit(4)
        job.take(failing="b")
        job.news()
        assert not begins(job, 400)
        job.leader.preemption_notice()  # which does not wait
        assert job.take()[0] == "prepare"

    check(vault)


@in_loop
def test_what_cannot_be_removed_is_said_once(vault):
    job = Job(vault)
    for version in (4, 8):
        job.commit(version)
        for _ in STEPS:
            job.take(uncleaned=("/kept/step-00000001.old could not be removed: in use",))
    assert [message.version for message in job.published] == [4, 8]
    said = "durable checkpoints: /kept/step-00000001.old could not be removed: in use"
    assert [line for line in job.said if "removed" in line] == [said]


@in_loop
def test_what_cannot_be_written_is_said_and_a_preemption_notice_end_does_not_come(vault):
    job = Job(vault, every_steps=None, every_s=3600.0)
    job.commit(4)
    job.leader.preemption_notice()
    job.take(), job.take()
    job.take(failing="b")
    assert job.said[-1] == "no durable checkpoint could be written: node b: no space"
    assert not job.left
    job.leader.preemption_notice()
    for _ in STEPS:
        job.take()
    assert job.left == 1


@in_loop
def test_a_version_that_is_gone_leads_to_another_and_a_copy_that_fails_is_said(vault):
    job = Job(vault, every_steps=None, every_s=3600.0)
    job.commit(4)
    job.leader.preemption_notice()
    job.take()
    (_, copy), *_ = job.news()
    job.leader.saved("a", peers.Saved(copy.attempt, CheckpointFailed("version 4 is not held", again=True)))
    assert not [word for word in job.said if "no durable checkpoint" in word]
    job.news()
    job.leader.check()
    job.take()
    job.take(failing="b")
    assert job.said[-1] == "no durable checkpoint could be written: node b: no space"


@in_loop
def test_versions_that_are_gone_again_and_again_count_as_a_failure(vault):
    job = Job(vault)
    job.commit(4)
    for _ in range(leader._MAX_VOID + 1):
        assert not job.said
        job.leader.check()
        (_, order), *_ = job.news()
        job.leader.saved("a", peers.Saved(order.attempt, CheckpointFailed("version 4 is not held", again=True)))
        job.news()
    assert job.said == ["no durable checkpoint could be written: version 4 is not held"]


@in_loop
def test_a_preemption_notice_end_comes_at_once_if_nothing_is_new(vault):
    job = Job(vault, known=peers.Durable(4, "/kept/it", "2026-01-01T00:00:00+00:00"))
    job.commit(4)
    job.leader.preemption_notice()
    assert job.left == 1


@in_loop
def test_a_preemption_notice_end_of_a_job_that_is_being_stopped_is_not_asked_for_again(vault):
    job = Job(vault, every_steps=None, every_s=3600.0)
    job.state = State(JobPhase.STOPPING, 1, job.state.seats, nodes=dict.fromkeys(HOMES))
    job.commit(4)
    job.leader.preemption_notice()
    assert (job.news(), job.left) == ([], 0)


@in_loop
def test_a_preemption_notice_end_waits_for_a_repair(vault):
    job = Job(vault, every_steps=None, every_s=3600.0)
    seats = job.state.seats
    job.state = State(JobPhase.REPAIRING, 1, seats, nodes=dict.fromkeys(HOMES))
    job.commit(4)
    job.leader.preemption_notice()
    assert not job.news()
    assert not job.left
    job.state = State(JobPhase.RUNNING, 1, seats, nodes=dict.fromkeys(HOMES))
    job.leader.decided()
    for _ in STEPS:
        job.take()
    assert job.left == 1


@pytest.mark.parametrize("phase", [JobPhase.REPAIRING, JobPhase.RUNNING])
def test_a_preemption_notice_end_waits_until_it_is_known_what_is_committed(vault, phase):
    @in_loop
    def check(vault):
        job = Job(vault, every_steps=None, every_s=3600.0)
        seats = job.state.seats
        job.state = State(phase, 1, seats, nodes=dict.fromkeys(HOMES))
        job.leader.preemption_notice()
        job.leader.decided()
        assert (job.news(), job.left) == ([], 0)
        job.state = State(JobPhase.RUNNING, 1, seats, nodes=dict.fromkeys(HOMES))
        job.commit(4)
        for _ in STEPS:
            job.take()
        assert (job.left, [message.version for message in job.published]) == (1, [4])

    check(vault)


DIFFER = ReplicasDifferError.exit_code


async def end(job, exit_code):
    """Let the run end while nodes take the steps that they are ordered to."""
    over = asyncio.ensure_future(job.leader.finish(exit_code, "it ended"))
    await asyncio.sleep(0)
    while job.told and not over.done():
        job.take()
        await asyncio.sleep(0)
    return await asyncio.wait_for(over, 10)


@pytest.mark.parametrize(("exit_code", "written"), [(0, [4]), (1, [4]), (DIFFER, [])])
def test_the_last_step_is_written_unless_its_replicas_may_differ(vault, exit_code, written):
    async def body():
        job = Job(vault, every_steps=None, every_s=3600.0)
        job.commit(4)
        assert await end(job, exit_code) == (exit_code, "it ended")
        assert [message.version for message in job.published] == written

    asyncio.run(body())


DIED = CheckpointFailed("the process that writes it was killed by SIGKILL", died=True)
GONE = CheckpointFailed("version 4 is not held", again=True)
FULL = CheckpointFailed("no space")


@pytest.mark.parametrize(
    ("answers", "attempts", "written"),
    [
        ([DIED], 2, [4]),
        ([GONE, DIED], 3, [4]),
        ([FULL], 1, []),
        ([DIED, FULL], 2, []),
        ([DIED, DIED, DIED], 3, []),
        ([GONE, GONE, GONE], 3, []),
    ],
    ids=lambda value: (
        "-".join(each.why.split()[0] for each in value) if isinstance(value, list) and value != [4] else None
    ),
)
def test_the_last_step_is_tried_again_if_another_process_may_write_it(vault, answers, attempts, written):
    """A process that was killed when the last step was written left a job without it."""

    async def body():
        job = Job(vault, every_steps=None, every_s=3600.0)
        job.commit(4)
        over = asyncio.ensure_future(job.leader.finish(0, "it ended"))
        names = []
        left = list(answers)
        for _ in range(100):
            await asyncio.sleep(0)
            if over.done():
                break
            orders = [message for _, message in job.told if isinstance(message, TakeStep)]
            names += [order.attempt for order in orders[:1] if order.attempt not in names]
            if orders and orders[0].step == CheckpointStep.COPY and left:
                job.news()
                job.leader.saved("a", peers.Saved(orders[0].attempt, left.pop(0)))
            elif orders:
                job.take()
        assert await asyncio.wait_for(over, 10) == (0, "it ended")
        assert (len(names), [message.version for message in job.published]) == (attempts, written)
        tried = "the last step could not be made durable in 3 attempts"
        assert job.said.count(tried) == (attempts == len(answers) == 3)

    asyncio.run(body())


def test_replicas_that_differ_void_what_is_being_written(vault):
    async def body():
        job = Job(vault)
        job.commit(4)
        job.take(), job.take()
        job.news()
        seats, stop = job.state.seats, JobEnd(DIFFER, "replicas differ")
        job.state = State(JobPhase.STOPPING, 1, seats, nodes=dict.fromkeys(HOMES), stop=stop)
        job.leader.decided()
        assert {node for node, message in job.news() if isinstance(message, peers.Void)} == set(HOMES)
        job.commit(8)
        assert await end(job, DIFFER) == (DIFFER, "it ended")
        assert (job.news(), job.published) == ([], [])

    asyncio.run(body())


@in_loop
def test_the_next_coordinator_goes_on_from_what_is_known(vault):
    job = Job(vault, known=peers.Durable(8, "/kept/it", "2026-01-01T00:00:00+00:00"))
    job.commit(11)
    assert not job.news()
    job.commit(12)
    assert job.take()[0] == "prepare"
    assert job.leader.report()["version"] == 8


@in_loop
def test_status_shows_no_password_of_a_url(vault):
    url, shown = "ftp://me:secret@host/kept", "ftp://me:***@host/kept"
    job = Job(vault, known=peers.Durable(8, f"{url}/it", "2026-01-01T00:00:00+00:00"), target=url)
    report = job.leader.report()
    assert (report["place"], report["where"], report["version"]) == (shown, f"{shown}/it", 8)


@in_loop
def test_a_world_begins_when_every_node_has_loaded_and_all_the_same(vault):
    job, called = Job(vault), []
    job.leader.begin()
    for node, ranks in HOMES.items():
        for rank in ranks:
            job.leader.seat(node, rank, lambda rank=rank: called.append(rank))
    for where in ("/kept/step-8", "/kept/step-4"):
        job.checkpointers.heard(
            CheckpointLoaded(int(where[-1]), where, "2026-01-01T00:00:00+00:00", [], f"d{where[-1]}")
        )
        orders = dict(job.news())
        assert {node: (order.ranks, order.where, order.record) for node, order in orders.items()} == {
            "a": ((0, 1), where, f"d{where[-1]}"),
            "b": ((2,), where, f"d{where[-1]}"),
        }
        job.leader.loaded("a", peers.Loaded(orders["a"].attempt, ""))
        assert not called
        job.leader.loaded("b", peers.Loaded(orders["b"].attempt, "damaged" if where[-1] == "8" else ""))
    assert job.checkpointers.asked[-1].but == ["/kept/step-8"]
    assert called == [0, 1, 2]
    assert job.leader.newest.version == 4


@in_loop
def test_a_node_keeps_the_version_until_it_is_copied_or_void(vault):
    checkpointers, answers = Checkpointers(), []
    share = CheckpointParticipant(checkpointers, vault, answers.append, lambda *_: None)

    def save(step, attempt="one"):
        share.take_step(TakeStep(step, "/kept", "run", attempt, 7, 2, 2, (0,), leads=False, ranks=(0, 1)))

    save("prepare")
    assert checkpointers.ranks == (0, 1)
    checkpointers.heard(StepTaken("prepare", "", 0))
    assert vault.status_page.kept == EMPTY
    save("copy")
    assert vault.status_page.kept == 7
    share.void("another")
    assert vault.status_page.kept == 7
    share.void("one")
    assert (vault.status_page.kept, checkpointers.killed) == (EMPTY, 1)
    save("survey")
    assert answers[-1].answer.why == "this node has given it up"


@in_loop
def test_a_node_tells_that_it_holds_a_version_only_when_ranks_are_given_away(vault):
    checkpointers, answers, held = Checkpointers(), [], []
    share = CheckpointParticipant(checkpointers, vault, answers.append, lambda *what: held.append(what))
    share.load(peers.Load("one", (0,), "/kept/step-8", "d8"))
    checkpointers.heard(CheckpointFailed("damaged"))
    assert (answers[-1], share.resume) == (peers.Loaded("one", "damaged"), -1)
    assert checkpointers.asked[-1] == FillSlots("/kept/step-8", 3, "d8")
    share.load(peers.Load("two", (0,), "/kept/step-4", "d4"))
    checkpointers.heard(CheckpointLoaded(4, "/kept/step-4", "", [], "d4"))
    assert (answers[-1], share.resume, held) == (peers.Loaded("two", ""), 4, [])
    assert vault.status_page.rank_entries[0].slots == (EMPTY, EMPTY)
    share.seated(Rank(0))
    assert (vault.status_page.rank_entries[0].slots, held) == ((4, EMPTY), [(0, 4)])


# --- one machine: the only node leads, and is the only participant -------------------------------------------------


def alone(vault, **more):
    return Job(vault, homes={"node": (0, 1, 2)}, here="node", alone=True, **more)


@in_loop
def test_the_only_node_takes_every_step_itself(vault):
    job = alone(vault)
    job.commit(4)
    assert [job.take() for _ in STEPS] == [(step, {"node"}) for step in STEPS]
    assert [message.version for message in job.published] == [4]


@in_loop
def test_the_only_node_is_not_named_in_what_cannot_be_written(vault):
    job = alone(vault)
    job.commit(4)
    job.take(failing="node")
    assert job.said == ["no durable checkpoint could be written: no space"]


@pytest.mark.parametrize("phase", [JobPhase.SETTING_UP, JobPhase.REPAIRING])
def test_one_machine_holds_every_slot_also_in_a_repair_or_set_up(vault, phase):
    @in_loop
    def check(vault):
        job = alone(vault)
        job.state = State(phase, 1, job.state.seats, nodes=job.state.nodes)
        job.commit(4)
        assert job.take()[0] == "prepare"

    check(vault)


@in_loop
def test_a_preemption_notice_before_the_first_step_ends_a_job_on_one_machine_at_once(vault):
    job = alone(vault)
    job.leader.preemption_notice()
    assert (job.left, job.news()) == (1, [])


@in_loop
def test_one_machine_loads_before_its_ranks_are_assigned(vault):
    job, called = alone(vault), []
    job.leader.begin()
    job.checkpointers.heard(CheckpointLoaded(8, "/kept/step-8", "2026-01-01T00:00:00+00:00", [], "d1"))
    ((node, order),) = job.news()
    assert (node, order.ranks) == ("node", (0, 1, 2))
    job.leader.seat("node", Rank(0), lambda: called.append(0))
    assert not job.news()
    job.leader.loaded("node", peers.Loaded(order.attempt, "damaged"))
    assert job.said == ["checkpoint /kept/step-8 is refused: damaged"]
    job.checkpointers.heard(CheckpointLoaded(4, "/kept/step-4", "2026-01-01T00:00:00+00:00", [], "d1"))
    ((_, order),) = job.news()
    assert not called
    job.leader.loaded("node", peers.Loaded(order.attempt, ""))
    job.leader.seat("node", Rank(1), lambda: called.append(1))
    assert called == [0, 1]


@in_loop
def test_a_rank_that_is_assigned_to_another_node_while_nodes_load_is_loaded_there(vault):
    job, called = Job(vault), []
    job.leader.begin()
    for node, ranks in HOMES.items():
        for rank in ranks:
            job.leader.seat(node, rank, lambda rank=rank: called.append(rank))
    job.checkpointers.heard(CheckpointLoaded(8, "/kept/step-8", "2026-01-01T00:00:00+00:00", [], "d1"))
    job.news()
    job.leader.seat("spare", Rank(2), lambda: called.append("again"))
    orders = dict(job.news())
    assert {node: order.ranks for node, order in orders.items()} == {"a": (0, 1), "spare": (2,)}
    for node, order in orders.items():
        job.leader.loaded(node, peers.Loaded(order.attempt, ""))
    assert called == [0, 1, 2, "again"]
