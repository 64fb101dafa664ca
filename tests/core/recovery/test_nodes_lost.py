"""Nodes that are lost together are one loss: one epoch, one recall of each survivor, one attempt."""

import copy

import pytest
from kit.invariants import check_invariants
from kit.replay import replay
from kit.started import bring_up

from deadpool_run.coordinator import journal
from deadpool_run.core import coordinator
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.recovery import blame, losses
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase

NODES, EACH, SPARE = 6, 8, 4
SETTINGS = Settings(world_size=NODES * EACH, nodes=NODES, spare_nodes=SPARE, replicas=2)


class Job:
    """A coordinator whose nodes obey; what it was told is kept."""

    def __init__(self):
        self.state = coordinator.new_state(SETTINGS)
        self.told = []
        self.lost = set()
        self.tell(ev.JobSubmitted("n0", ev.Place("n0")))
        for at in range(1, NODES + SPARE):
            self.tell(ev.NodeJoined(f"n{at}", ev.Place(f"n{at}")))
        bring_up(self.state, self.tell)
        self.tell(ev.SnapshotCommitted(0, self.state.epoch))
        assert self.state.phase is JobPhase.RUNNING

    def tell(self, event):
        now = len(self.told) / 1000
        effects = coordinator.step(SETTINGS, self.state, event, now)
        check_invariants(SETTINGS, self.state)
        self.told.append((now, event, effects))
        return effects

    def lose(self, *names):
        self.lost |= set(names)
        return self.tell(ev.NodesLost(tuple(ev.NodeLost(name, "power") for name in names)))

    def obey(self, effects, until=do.StopJob):
        """Do what is ordered, on nodes that are there, until such an order comes; return whether it came."""
        orders = list(effects)
        for order in orders:
            if isinstance(order, until):
                return True
            for answer in self.answers(order):
                orders += self.tell(answer)
        return False

    def answers(self, order):
        if getattr(order, "node", None) in self.lost or getattr(order, "worker", None) in self.gone():
            return
        match order:
            case do.AbortStep(worker, epoch):
                replacement = self.state.members[worker].replacement
                yield (
                    ev.ReplacementRehearsed(worker, epoch)
                    if replacement
                    else ev.AbortCompleted(worker, epoch, 5, 5, (4, 5))
                )
            case do.ReportReplicas(node, rank, epoch):
                yield ev.ReplicasReported(node, rank, epoch, (4, 5))
            case do.AssignRank(worker, _, epoch):
                yield ev.ReplacementRehearsed(worker, epoch)
            case do.ResumeFrom(worker, epoch):
                yield ev.RankRestored(worker, epoch)
            case do.AttachGroups(worker, epoch):
                yield ev.RankAttached(worker, epoch)
                yield ev.FirstStepCompleted(worker, epoch)

    def gone(self):
        return {order.worker for _, _, effects in self.told for order in effects if hasattr(order, "worker")} - set(
            self.state.members
        )


def check_one_repair():
    job = Job()
    epoch = job.state.epoch
    effects = job.lose("n1", "n2")
    assert job.state.epoch == epoch + 1
    recalled = [order.worker for order in effects if isinstance(order, do.AbortStep)]
    assert len(recalled) == len(set(recalled)) == (NODES - 2) * EACH
    assert job.state.repair.attempts == 1
    assert len(job.state.repair.losses) == 2 * EACH
    job.obey(effects)
    assert job.state.phase is JobPhase.RUNNING
    assert job.state.epoch == epoch + 1
    (incident,) = job.state.incidents
    assert len(incident.losses) == 2 * EACH
    return job


def test_one_repair():
    check_one_repair()


def test_that_they_are_told_one_by_one_would_be_noticed(monkeypatch):
    honest = losses.nodes_lost

    def one_by_one(decision, lost):
        for loss in lost:
            honest(decision, (loss,))

    monkeypatch.setattr(losses, "nodes_lost", one_by_one)
    with pytest.raises(AssertionError, match="epoch"):
        check_one_repair()


def test_the_reason_names_a_few_of_many():
    job = Job()
    effects = job.lose("n1", "n2", "n3", "n6", "n7", "n8", "n9")
    repairing = next(order for order in effects if isinstance(order, do.Announce) and "repairing" in order.what)
    assert repairing.reason == "nodes n1, n2, n3, n6, n7 and 2 more are lost: power"


def test_a_node_that_is_lost_in_the_repair_is_an_epoch_of_its_own():
    job = Job()
    epoch = job.state.epoch
    assert job.obey(job.lose("n2"), until=do.AttachGroups)
    (replacements_on,) = {member.node for member in job.state.owners()} - {f"n{at}" for at in range(NODES)}
    effects = job.lose(replacements_on)
    assert job.state.epoch == epoch + 2
    assert job.state.repair.attempts == 2, f"{EACH} ranks that were lost together are one attempt"
    assert blame.MAX_ATTEMPTS < EACH
    job.obey(effects)
    assert job.state.phase is JobPhase.RUNNING


def test_one_that_is_not_there_any_more_changes_nothing():
    job = Job()
    job.lose("n9")
    before = copy.deepcopy(job.state)
    job.lose("n9", "nowhere")
    assert job.state == before


def test_while_the_coordinator_moves_each_is_noted_or_waits():
    job = Job()
    job.tell(ev.CoordinatorMoved(1, "n1"))
    job.tell(ev.NodeJoined("late", ev.Place("late")))
    job.lose("n0", "late")
    assert set(job.state.move.lost) == {"n0"}
    assert "n0" not in job.state.move.waiting
    assert job.state.move.deferred[1:] == [ev.NodeLost("late", "power")]


def test_a_journal_of_it_replays_to_the_same_state(tmp_path):
    job = check_one_repair()
    book = journal.Journal(tmp_path / "journal", SETTINGS)
    for now, event, effects in job.told:
        book.append(now, event, effects, job.state)
    book.close()
    replayed = replay(tmp_path / "journal")
    assert replayed.state == job.state
    assert not replayed.divergences
    assert any(isinstance(event, ev.NodesLost) for _, event, _ in job.told)
