"""The coordinator's server: reports of one turn of the loop are decided on together, and in order with all other events."""

import asyncio

from kit.invariants import check_invariants
from kit.started import bring_up

from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase

RANKS = 100
SURVIVORS = range(1, RANKS)
SETTINGS = Settings(world_size=RANKS, spares=1)
LIMIT_S = 30


class Server(CoordinatorServer):
    """A server with a list of the events on which it has decided, in the repair after the loss of rank 0."""

    def __init__(self, path):
        self.told, self.may = [], True
        self.journal = Journal(path, SETTINGS)
        super().__init__(SETTINGS, lambda _: None, self.journal, lambda: None, may_decide=lambda: self.may)
        self.on_entry = lambda _, event: self.told.append(event)
        self.submit(ev.JobSubmitted())
        bring_up(self.state, self.submit)
        self.submit(ev.WorkerExited(0, None, 9, (4, 5)))
        self.told.clear()
        self.aborted = [ev.AbortCompleted(worker, self.state.epoch, 5, 5, (4, 5)) for worker in SURVIVORS]

    def end(self):
        self.close()
        self.journal.close()
        check_invariants(SETTINGS, self.state)


def with_server(test):
    """Run the test in a loop, with a server."""

    def run(tmp_path):
        async def main():
            server = Server(tmp_path / "journal")
            await test(server)
            server.end()

        asyncio.run(asyncio.wait_for(main(), LIMIT_S))

    return run


@with_server
async def test_reports_of_one_turn_are_one_event_of_at_most_64(server):
    for report in server.aborted:
        server.submit(report)
    first, rest = (ev.RanksReported(tuple(part)) for part in (server.aborted[:64], server.aborted[64:]))
    assert server.told == [first]
    await asyncio.sleep(0)
    assert server.told == [first, rest]
    server.submit(ev.ReplacementRehearsed(RANKS, server.state.epoch))
    server.told.clear()
    server.submit(alone := ev.RankRestored(1, server.state.epoch))
    await asyncio.sleep(0)
    assert server.told == [alone]


@with_server
async def test_other_events_come_after_the_reports_before_them(server):
    first, second, third = server.aborted[:3]
    exited = ev.WorkerExited(50, None, 9, (4, 5))
    for event in (first, second, exited, third):
        server.submit(event)
    assert server.told == [ev.RanksReported((first, second)), exited]
    server._reached()  # a deadline: after a pause of the machine, reports and it are due at once
    assert server.told[2:] == [third, ev.TimeAdvanced()]


@with_server
async def test_the_whole_repair_follows_from_reports_that_come_together(server):
    epoch = server.state.epoch
    for report in (*server.aborted, ev.ReplacementRehearsed(RANKS, epoch)):
        server.submit(report)
    for kind in (ev.RankRestored, ev.RankAttached, ev.FirstStepCompleted):
        for worker in (*SURVIVORS, RANKS):
            server.submit(kind(worker, epoch))
        await asyncio.sleep(0)
    assert (server.state.phase, server.state.repair) == (JobPhase.RUNNING, None)
    assert len(server.told) <= 9


@with_server
async def test_reports_that_wait_while_nothing_may_be_decided_are_not_lost(server):
    reports = server.aborted[:3]
    server.submit(reports[0])
    server.may = False
    server.hold()
    for report in reports[1:]:
        server.submit(report)
    await asyncio.sleep(0)
    assert server.told == []
    server.may = True
    server.resume()
    told = [each for event in server.told for each in getattr(event, "reports", (event,))]
    assert told == [*reports, ev.TimeAdvanced()]
