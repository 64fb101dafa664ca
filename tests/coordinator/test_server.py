"""The coordinator's server: reports of one turn of the loop are decided on together, and in order with all other events."""

import asyncio

from kit.invariants import check_invariants

from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase

RANKS = 100
SETTINGS = Settings(world_size=RANKS, spares=1)
LIMIT_S = 30


class Server(CoordinatorServer):
    """A server with a list of the events on which it has decided."""

    def __init__(self, path, may_decide=lambda: True):
        self.told, self.path = [], path
        self.journal = Journal(path, SETTINGS)
        super().__init__(SETTINGS, lambda _: None, self.journal, lambda: None, may_decide=may_decide)
        self.on_entry = lambda _, event: self.told.append(event)

    def end(self):
        self.close()
        self.journal.close()
        check_invariants(SETTINGS, self.state)


def repairs(server):
    """Bring up the job, and lose rank 0; return the epoch and the survivors."""
    server.submit(ev.JobSubmitted())
    for worker in range(RANKS + 1):
        server.submit(ev.WorkerStarted(worker, 100 + worker))
        server.submit(ev.WorkerReady(worker))
    for worker in range(RANKS):
        server.submit(ev.ScriptInitialized(worker))
        server.submit(ev.TranscriptCompleted(worker))
    server.submit(ev.WorkerExited(0, None, 9, (4, 5)))
    server.told.clear()
    return server.state.epoch, range(1, RANKS)


def run(main):
    asyncio.run(asyncio.wait_for(main, LIMIT_S))


def test_reports_of_one_turn_are_one_event_of_at_most_64(tmp_path):
    async def main():
        server = Server(tmp_path / "journal")
        epoch, survivors = repairs(server)
        reports = [ev.AbortCompleted(worker, epoch, 5, 5, (4, 5)) for worker in survivors]
        for report in reports:
            server.submit(report)
        assert server.told == [ev.RanksReported(tuple(reports[:64]))]
        await asyncio.sleep(0)
        assert server.told == [ev.RanksReported(tuple(reports[:64])), ev.RanksReported(tuple(reports[64:]))]
        server.submit(ev.ReplacementRehearsed(RANKS, epoch))
        server.told.clear()
        server.submit(ev.RankRestored(1, epoch))
        await asyncio.sleep(0)
        assert server.told == [ev.RankRestored(1, epoch)]
        server.end()

    run(main())


def test_other_events_come_after_the_reports_before_them(tmp_path):
    async def main():
        server = Server(tmp_path / "journal")
        epoch, survivors = repairs(server)
        first, second, third = (ev.AbortCompleted(worker, epoch, 5, 5, (4, 5)) for worker in list(survivors)[:3])
        exited = ev.WorkerExited(50, None, 9, (4, 5))
        for event in (first, second, exited, third):
            server.submit(event)
        assert server.told == [ev.RanksReported((first, second)), exited]
        server._reached()  # a deadline: after a pause of the machine, reports and it are due at once
        assert server.told[2:] == [third, ev.TimeAdvanced()]
        server.end()

    run(main())


def test_the_whole_repair_follows_from_reports_that_come_together(tmp_path):
    async def main():
        server = Server(tmp_path / "journal")
        epoch, survivors = repairs(server)
        for worker in survivors:
            server.submit(ev.AbortCompleted(worker, epoch, 5, 5, (4, 5)))
        server.submit(ev.ReplacementRehearsed(RANKS, epoch))
        for kind in (ev.RankRestored, ev.RankAttached, ev.FirstStepCompleted):
            for worker in (*survivors, RANKS):
                server.submit(kind(worker, epoch))
            await asyncio.sleep(0)
        assert (server.state.phase, server.state.repair) == (JobPhase.RUNNING, None)
        assert len(server.told) <= 9
        server.end()

    run(main())


def test_reports_that_wait_while_nothing_may_be_decided_are_not_lost(tmp_path):
    async def main():
        may = [True]
        server = Server(tmp_path / "journal", lambda: may[0])
        epoch, survivors = repairs(server)
        reports = [ev.AbortCompleted(worker, epoch, 5, 5, (4, 5)) for worker in list(survivors)[:3]]
        server.submit(reports[0])
        may[0] = False
        server.hold()
        for report in reports[1:]:
            server.submit(report)
        await asyncio.sleep(0)
        assert server.told == []
        may[0] = True
        server.resume()
        told = [each for event in server.told for each in getattr(event, "reports", (event,))]
        assert told == [*reports, ev.TimeAdvanced()]
        server.end()

    run(main())
