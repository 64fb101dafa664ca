"""Giving up on what Gloo does not end: in the order of the aborts, once each, and in one thread."""

import threading

from deadpool_run.worker.groups.waits import WaitCancellation, WaitThreads


class Counted(WaitThreads):
    """Counts the threads that are asked for while none of the earlier ones is done."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def start(self, task):
        self.asked += 1
        super().start(task)


def gives_up_in_order(member, count):
    threads = Counted()
    cancellation = WaitCancellation(threads)
    told, over = [], threading.Event()

    def note(generation):
        told.append((generation, cancellation.newest))

    for generation in range(1, count + 1):
        cancellation.add_callback(lambda generation=generation: note(generation), generation)
    forgotten = lambda: note(0)  # noqa: E731 - the same object twice
    cancellation.add_callback(forgotten, count)
    cancellation.remove_callback(forgotten)
    cancellation.add_callback(over.set, count)
    for generation in range(1, count + 1):
        cancellation.schedule(generation)
    asked = threads.asked
    assert over.wait(20)
    cancellation.add_callback(lambda: note(1), 1)  # whoever comes too late is told at once
    return told, asked


def test_many_aborts_in_a_row_are_given_up_in_order_by_one_thread(make_world):
    (result,) = make_world(1).run(gives_up_in_order, 30)
    told, asked = result
    assert told == [(generation, generation) for generation in range(1, 31)] + [(1, 30)]
    assert asked == 1


def again_after_a_rest(member):
    cancellation = WaitCancellation(WaitThreads())
    for generation in (1, 2):
        over = threading.Event()
        cancellation.add_callback(over.set, generation)
        assert not over.is_set()
        cancellation.schedule(generation)
        assert over.wait(20)
    return cancellation.newest


def test_an_abort_after_all_others_were_given_up_is_given_up_too(make_world):
    assert make_world(1).run(again_after_a_rest) == [2]
