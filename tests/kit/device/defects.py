"""Defects of the code for GPUs, planted on purpose: each makes the named test fail.

The variable `PLANTED` in the environment names a defect. The fake device plants it in each process that uses the device, and
`python -m pytest -p kit.device.defects` in the process of the tests. Letters come from the review that found the defects.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from deadpool_run.worker.codec import tensors_in
from deadpool_run.worker.device import channel, nccl, run_ahead
from deadpool_run.worker.groups import collectives, connect, gloo, group, owner, registry
from deadpool_run.worker.groups.collectives import COALESCED
from deadpool_run.worker.groups.owner import NO_ATTEMPT
from deadpool_run.worker.groups.works import FakeWork
from deadpool_run.worker.snapshot import snapshot

PLANTED = "PLANTED"


@dataclass(frozen=True)
class Defect:
    """A defect, the function that plants it, and the test that finds it."""

    letter: str
    what: str
    plant: Callable[[], None]
    file: str
    test: str
    shows: str
    """A part of the failed test's output. It is empty if the output depends on the order of threads."""

    @property
    def name(self) -> str:
        """The name of the function that plants it."""
        return self.plant.__name__


def plant_named():
    """Plant the defect that the environment names, once per process."""
    if name := os.environ.pop(PLANTED, ""):
        next(defect.plant for defect in DEFECTS if defect.name == name)()


def pytest_configure():
    """Plant the defect in the process of the tests, and keep its name in the environment for child processes."""
    if name := os.environ.get(PLANTED, ""):
        plant_named()
        os.environ[PLANTED] = name


def aborts_in_turn():
    plain = channel.ChannelsEnd._end

    def end(self, each):
        if before := self.channels.index(each):
            self._threads[before - 1].join()
        plain(self, each)

    channel.ChannelsEnd._end = end


def aborts_inside():
    channel.Channel.wait_idle = lambda *_: None


def barrier_inside():
    group.c10d.asynchronous = lambda options: options


def barrier_without_device():
    group.place_of = lambda _, parts: next((tensor.device for tensor in tensors_in(parts[:2])), None)


def records_works_only():
    plain = group.Group.issue_on_device

    def issue(self, *call):
        parts = call[-1]
        is_async = all(getattr(part, "asyncOp", True) for part in parts)
        if is_async and self._coalescing.started is None:
            return plain(self, *call)
        recording, self.registry.recording = self.registry.recording, None
        try:
            return plain(self, *call)
        finally:
            self.registry.recording = recording

    group.Group.issue_on_device = issue


def leaves_coalescings_open():
    plain = group.Group._end_coalescing

    def end(self, device):
        if self.inner is not None:
            return plain(self, device)
        self._coalescing.started = None
        self.registry.note_fake(COALESCED.name)
        return FakeWork(self, COALESCED, (), attempt=NO_ATTEMPT)

    group.Group._end_coalescing = group.Group.end_coalescing = end
    group.Group.close_coalescing = lambda *_: None


def _connects_with(name, method):
    """Replace the device's method `name` while an attempt connects it. `method` gets the attempt, too."""
    plain = connect.ConnectAttempt._work

    def work(self, peers):
        device = self._device
        setattr(device, name, partial(method, self, device))
        try:
            plain(self, peers)
        finally:
            delattr(device, name)

    connect.ConnectAttempt._work = work


def connects_in_a_step():
    _connects_with("connect", lambda *_: None)


def connects_to_the_end():
    connect.ConnectAttempt.cancel = lambda *_: None


def creates_under_the_lock():
    def create(attempt, device, *args):
        with attempt._lock:
            return type(device).create(device, *args)

    _connects_with("create", create)


def aborts_at_the_end():
    registry.Registry._end_in_order = lambda *_: None


def watchdog_sleeps():
    del nccl.SETTINGS["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]


def waits_for_no_abort():
    def wait(self, _deadline):
        self._aborts.clear()
        return ""

    registry.Registry._wait_aborted = wait


def keeps_the_aborted():
    registry.release = lambda _, channels: channel.ChannelsEnd(lambda _: None, channels, what="release")


def commits_what_runs():
    plain = snapshot.Snapshots._capture
    snapshot.Snapshots._capture = lambda self, version: replace(plain(self, version), ended=True)


def runs_far_ahead():
    run_ahead.RunAhead.end_step = lambda self, **_: setattr(self, "_last", self._backend.mark())


def joins_no_stream():
    run_ahead.RunAhead.join = lambda _: None


def keeps_live_weights():
    owner.GroupOwner.intact = property(lambda _: True, lambda *_: None)


def asks_for_no_error():
    registry.Registry.find_failure = lambda _: False


def captures_collectives():
    plain = group.Group.issue_on_device

    def issue(self, *args):
        device = self._device
        device.check_issue = lambda _: None
        return plain(self, *args)

    group.Group.issue_on_device = issue


def drops_options():
    plain = registry.Registry.create
    registry.Registry.create = lambda self, options, library_options=None: plain(
        self, options, None if isinstance(library_options, dict) else library_options
    )


def repeats_outputs():
    def gather(parts, _rank, size):
        for output, source in zip(collectives._first(parts), tensors_in(parts[1]), strict=False):
            output.data.copy_(source.reshape(-1).repeat(size).view(output.shape))

    for each in collectives.COLLECTIVES:
        if each.fake is collectives._gather_flat:
            object.__setattr__(each, "fake", gather)


def all_errors_are_losses():
    nccl.Nccl.is_peer_failure = lambda _, error: gloo.is_peer_failure(error)


def one_abort_that_fails_hides():
    def end(self, each):
        each.wait_idle()
        self._action(each)

    channel.ChannelsEnd._end = end


_CONFORMANCE = "tests/worker/device/test_conformance.py"
_AHEAD = "tests/worker/device/test_run_ahead.py"
_LOSSES = "tests/worker/device/test_device_losses.py"

DEFECTS = (
    Defect(
        "A",
        "communicators are aborted one after the other",
        aborts_in_turn,
        _CONFORMANCE,
        "test_several_stuck_communicators_are_aborted_at_the_same_time",
        "processes did not finish within",
    ),
    Defect(
        "B",
        "an abort does not wait for a call that is inside",
        aborts_inside,
        _CONFORMANCE,
        "test_an_abort_waits_for_the_call_that_is_inside",
        "self.fake.violations == []",
    ),
    Defect(
        "B",
        "the host waits for a barrier inside the call",
        barrier_inside,
        _CONFORMANCE,
        "test_a_barrier_goes_where_its_device_ids_say",
        "processes did not finish within",
    ),
    Defect(
        "C",
        "a barrier uses Gloo because it has no tensor",
        barrier_without_device,
        _CONFORMANCE,
        "test_a_barrier_goes_where_its_device_ids_say",
        "device.fake.launches ==",
    ),
    Defect(
        "D",
        "only collectives that return a work are recorded",
        records_works_only,
        _CONFORMANCE,
        "test_a_replacement_rehearses_with_what_synchronous_and_coalesced_collectives_received",
        "where allreduce of [1] int64 was recorded",
    ),
    Defect(
        "E",
        "a coalescing is not ended when an abort interrupts it",
        leaves_coalescings_open,
        _CONFORMANCE,
        "test_a_coalescing_that_an_abort_cuts_poisons_no_later_call",
        "self.fake.violations == []",
    ),
    Defect(
        "F",
        "communicators are connected after the attach",
        connects_in_a_step,
        _CONFORMANCE,
        "test_a_loss_frees_a_rank_that_connects_on_the_device",
        "it was not connected with the group",
    ),
    Defect(
        "F",
        "a loss does not interrupt a rank that connects",
        connects_to_the_end,
        _CONFORMANCE,
        "test_a_loss_frees_a_rank_that_connects_on_the_device",
        "DID NOT RAISE",
    ),
    Defect(
        "G",
        "a normal end aborts running collectives",
        aborts_at_the_end,
        _CONFORMANCE,
        "test_a_rank_that_ends_first_brings_its_collectives_to_their_end",
        "",
    ),
    Defect(
        "H",
        "the watchdog sleeps while it holds the lock of all collectives",
        watchdog_sleeps,
        _LOSSES,
        "test_an_error_that_the_library_finds_by_itself_starts_a_repair",
        "self.fake.violations == []",
    ),
    Defect(
        "I",
        "an attach does not wait for the aborts",
        waits_for_no_abort,
        _CONFORMANCE,
        "test_a_rank_whose_abort_is_late_does_not_attach",
        "DID NOT RAISE",
    ),
    Defect(
        "J",
        "aborted communicators are kept",
        keeps_the_aborted,
        _CONFORMANCE,
        "test_nothing_of_past_epochs_stays_in_memory",
        "",
    ),
    Defect(
        "K",
        "a step is committed before the device has completed it",
        commits_what_runs,
        _AHEAD,
        "test_a_step_that_the_device_had_not_ended_when_an_abort_began_is_no_snapshot",
        "assert (0, 1) == (0,)",
    ),
    Defect(
        "K",
        "the host runs ahead of the device without a limit",
        runs_far_ahead,
        _AHEAD,
        "test_the_end_of_a_step_waits_for_the_step_before",
        "is_alive()",
    ),
    Defect(
        "K",
        "a step ends before its updates on another stream",
        joins_no_stream,
        _AHEAD,
        "test_a_snapshot_has_what_an_optimizer_on_another_stream_writes",
        "it has copied what the update had not written",
    ),
    Defect(
        "K",
        "survivors keep weights that the device had not written yet",
        keeps_live_weights,
        _LOSSES,
        "test_weights_of_a_step_that_the_device_had_not_ended_are_not_kept",
        "",
    ),
    Defect(
        "K",
        "errors that the library finds by itself are not checked",
        asks_for_no_error,
        _LOSSES,
        "test_an_error_that_the_library_finds_by_itself_starts_a_repair",
        "assert member.registry.find_failure()",
    ),
    Defect(
        "L",
        "a graph captures a collective, and an abort waits for the graph",
        captures_collectives,
        _LOSSES,
        "test_a_collective_in_a_captured_graph_is_refused",
        "DID NOT RAISE",
    ),
    Defect(
        "M",
        "the script's options are dropped",
        drops_options,
        _CONFORMANCE,
        "test_a_groups_own_options_reach_the_library_and_gloo_groups_stay_on_the_host",
        "([None, None], [2.0, 2.0])",
    ),
    Defect(
        "O",
        "a fake all-gather repeats one output",
        repeats_outputs,
        _LOSSES,
        "test_a_fake_gather_makes_no_second_output",
        "largest.most <= source.numel()",
    ),
    Defect(
        "Q",
        "every error counts as a lost peer",
        all_errors_are_losses,
        _LOSSES,
        "test_an_error_of_the_script_is_raised_and_one_of_a_peer_starts_a_repair",
        "('', True, True, True)",
    ),
    Defect(
        "S",
        "a failed abort is not noticed",
        one_abort_that_fails_hides,
        _LOSSES,
        "test_an_abort_that_fails_keeps_a_rank_from_attaching",
        "DID NOT RAISE",
    ),
    Defect(
        "S",
        "a communicator is created under the lock that a loss needs",
        creates_under_the_lock,
        _LOSSES,
        "test_a_loss_frees_a_rank_that_creates_a_communicator",
        "[False]",
    ),
)
"""Letters of the review without a defect here: N is a sentence of docs/gpu.md, P is tested in the core (`test_gpu_places`),
R is a number, and T was the lack of these tests."""
