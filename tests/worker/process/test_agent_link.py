"""A worker's line to its agent, over a real socketpair."""

import os
import socket
import threading

import pytest
from kit.orders import assign

from deadpool_run.core.effects import AbortStep, LimitSteps, ReleaseWorker, ResumeFrom
from deadpool_run.core.events import LoopFinished
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import WorkerId
from deadpool_run.wire.messages import (
    FORMAT,
    THIS_WORKER,
    Attach,
    Dismiss,
    Stop,
    encode,
)
from deadpool_run.worker.process.agent_link import AgentLink, AgentOrders, park

ASSIGN = assign(rank=1, local_rank=1, epoch=3)
ME = WorkerId(7)


@pytest.fixture
def pair():
    agent, worker = socket.socketpair()
    with agent, worker:
        yield agent, worker


def test_park_takes_the_rank_its_descriptors_and_not_one_byte_more(pair):
    agent, worker = pair
    read_end, write_end = os.pipe()
    order = assign(fds=("status_page",))
    socket.send_fds(agent, [encode(order)], [read_end])
    agent.sendall(encode(AbortStep(ME, 4)))
    taken, fds = park(worker)
    assert taken == order
    os.write(write_end, b"x")
    assert os.read(fds[0], 1) == b"x"
    assert list(FORMAT.frames().feed(worker.recv(1000))) == [AbortStep(ME, 4)]
    for fd in (read_end, write_end, *fds):
        os.close(fd)


@pytest.mark.parametrize("order", [Dismiss(), Stop()])
def test_park_is_dismissed(pair, order):
    agent, worker = pair
    agent.sendall(encode(order))
    assert park(worker) is None


def test_park_refuses_what_is_not_for_a_parked_worker(pair):
    agent, worker = pair
    agent.sendall(encode(ReleaseWorker(ME)))
    with pytest.raises(ProtocolError, match="ReleaseWorker"):
        park(worker)


def test_orders_of_an_older_epoch_are_void():
    orders = AgentOrders(5)
    assert not orders.put(ResumeFrom(ME, 4, 17))
    assert orders.put(AbortStep(ME, 6))
    assert not orders.put(ResumeFrom(ME, 5, 17))
    assert not orders.put(Attach(5))
    assert not orders.put(AbortStep(ME, 5))
    orders.put(ResumeFrom(ME, 6, 18))
    assert orders.wait_resume(6) == 18


def test_a_newer_epoch_voids_what_was_ordered_before():
    orders = AgentOrders(5)
    orders.put(ResumeFrom(ME, 5, 17))
    orders.put(Attach(5))
    orders.put(AbortStep(ME, 6))
    assert orders.wait_resume(5) is None
    assert orders.wait_attach(5) is None
    assert orders.wait_newer(5) == 6
    orders.put(ResumeFrom(ME, 6, 16))
    assert orders.wait_resume(6) == 16
    orders.put(Attach(6, "10.0.0.2", 29500))
    assert orders.wait_attach(6) == Attach(6, "10.0.0.2", 29500)


def test_release_ends_the_wait_and_an_abort_ends_it_otherwise():
    orders = AgentOrders(1)
    orders.put(AbortStep(ME, 2))
    assert not orders.wait_release(1)
    orders.put(ReleaseWorker(ME))
    assert orders.wait_release(2)


def limit(orders, version, epoch=1):
    return orders.limit(LimitSteps(ME, epoch, version))


def test_the_loop_stops_at_the_limit_or_after_the_step_that_has_begun():
    orders = AgentOrders(1)
    assert orders.begins_step(3, 10)
    assert limit(orders, 0) == 4
    assert not orders.begins_step(4, 10)
    assert limit(orders, 5) == 5
    assert orders.begins_step(4, 10)
    assert limit(orders, 5) == 5
    assert not orders.begins_step(5, 10)


def test_no_limit_is_beyond_the_last_step():
    orders = AgentOrders(1)
    assert orders.begins_step(9, 10)
    assert orders.begins_step(10, 10)
    assert limit(orders, 0) == 10


def test_a_limit_ends_by_an_order_by_a_higher_one_and_by_a_newer_epoch():
    orders = AgentOrders(1)
    limit(orders, 5)
    first = orders.wait_limit(5, 1, None)
    assert first is not None
    limit(orders, 5)
    again = orders.wait_limit(5, 1, first)
    assert again is not first
    limit(orders, 6)
    assert orders.wait_limit(5, 1, again) is None
    assert limit(orders, None) is None
    assert orders.begins_step(6, 10)
    limit(orders, 7)
    orders.put(AbortStep(ME, 2))
    assert orders.wait_limit(7, 1, None) is None
    assert limit(orders, 0) is None, "of an older epoch"
    assert orders.begins_step(7, 10)


@pytest.mark.parametrize("wait", ["wait_newer", "wait_resume", "wait_attach", "wait_release"])
def test_no_wait_outlives_the_job(wait):
    orders = AgentOrders(1)
    orders.put(Stop())
    with pytest.raises(SystemExit):
        getattr(orders, wait)(1)


def test_link_calls_back_after_the_order_is_kept_and_sends(pair):
    agent, worker = pair
    link = AgentLink(worker, 1)
    heard = threading.Event()
    seen = []

    def on_abort(epoch):
        seen.append((epoch, link.orders.epoch))
        heard.set()

    link.subscribe(on_abort=on_abort, on_interval=lambda _interval: None)
    agent.sendall(encode(AbortStep(ME, 2)))
    assert heard.wait(10)
    assert seen == [(2, 2)]
    link.send(LoopFinished(THIS_WORKER, 9))
    assert list(FORMAT.frames().feed(agent.recv(1000))) == [LoopFinished(THIS_WORKER, 9)]
    # The thread ends the process when the agent is gone: give it a quiet end instead.
    link._owner_pid = 0
    agent.close()
    link._thread.join(10)
    assert not link._thread.is_alive()


@pytest.mark.parametrize("junk", [b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x10" + b"x" * 16, b"\xff\xff\xff\xff"])
def test_junk_is_a_protocol_error(junk):
    with pytest.raises(ProtocolError):
        list(FORMAT.frames().feed(junk))
