"""Viewers share one status, which is made after each of them has asked, and costs the leader a bounded share of its time."""

import asyncio
import json

import pytest

from deadpool_run.coordinator.requests import RequestHandler, is_error
from deadpool_run.coordinator.shared_status import Budget


class Job:
    """A leader whose status tells how many were made."""

    def __init__(self):
        self.made = 0
        self.fails = False

    def status(self):
        self.made += 1
        if self.fails:
            raise ValueError("no status")
        return {"made": self.made, "name": "gpu\ud800"}


def handled(scenario):
    """Run a scenario with a handler and its job."""

    async def run():
        job = Job()
        return await scenario(RequestHandler(2, job), job)

    return asyncio.run(run())


async def ask(handler, count=1):
    answers = await asyncio.gather(*(handler.encoded({"do": "status"}) for _ in range(count)))
    return [json.loads(answer) for answer in answers]


def test_all_who_wait_get_the_same_status_which_is_newer_than_their_request():
    async def scenario(handler, job):
        first = await ask(handler, 5)
        job.made = 10
        return first, await ask(handler, 3)

    first, later = handled(scenario)
    assert [each["made"] for each in first] == [1] * 5
    assert [each["made"] for each in later] == [11] * 3


def test_another_request_does_not_wait_for_the_status():
    async def scenario(handler, _job):
        order = []
        handler.answer_later({"do": "status"}, lambda _: order.append("status"))
        handler.answer_later({"do": "dance"}, lambda answer: order.append(is_error(answer)))
        await ask(handler)
        return order

    assert handled(scenario) == [True, "status"]


def test_a_status_that_cannot_be_made_is_logged_and_told(caplog):
    async def scenario(handler, job):
        job.fails = True
        failed = await handler.encoded({"do": "status"})
        job.fails = False
        return failed, await ask(handler)

    failed, later = handled(scenario)
    assert is_error(failed)
    assert later[0]["made"] == 2
    assert "no status" in caplog.text


def test_who_waits_when_the_leader_ends_is_told_and_so_is_who_asks_later():
    async def scenario(handler, job):
        waiting = asyncio.ensure_future(handler.encoded({"do": "status"}))
        await asyncio.sleep(0)
        handler.close()
        return await waiting, await handler.encoded({"do": "status"}), job.made

    *answers, made = handled(scenario)
    assert all(is_error(answer) for answer in answers)
    assert made == 0


@pytest.mark.parametrize("cost_s", [0.0003, 0.02, 0.03])
def test_in_the_long_run_statuses_take_a_hundredth_of_the_time(cost_s):
    budget, now, used_s = Budget(), 1000.0, 0.0
    while now < 2000:
        now += budget.pause_s(now)
        if now < 2000:
            budget.use(cost_s, now)
            used_s += cost_s
    # not less either: a job that can afford it answers at once
    assert 0.9 <= used_s / (Budget.BURST_S + Budget.SHARE * 1000) <= 1.1


def test_after_a_quiet_while_several_are_made_at_once():
    budget = Budget()
    for _ in range(3):
        assert budget.pause_s(5.0) == 0
        budget.use(0.03, 5.0)
    budget.use(0.03, 5.0)
    assert budget.pause_s(5.0) == pytest.approx(2.0)
    assert budget.pause_s(8.0) == 0


def test_a_status_that_takes_very_long_is_still_made_before_viewers_give_up():
    budget = Budget()
    budget.use(60.0, 5.0)
    assert budget.pause_s(5.0) == pytest.approx(Budget.LONGEST_PAUSE_S)
