"""The kit's checks find what they must find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit import processes
from kit.account import Account

pytest_plugins = ["pytester"]

REFERENCE = {(0, 0): "a", (0, 1): "b", (1, 0): "c", (1, 1): "d"}


def told(*states):
    """Make an account. Each state is (rank, pid, version, digest)."""
    starts = [{"kind": "start", "rank": rank, "pid": pid} for rank, pid in dict.fromkeys((s[0], s[1]) for s in states)]
    return Account(
        [*starts, *({"kind": "state", "rank": r, "pid": p, "version": v, "digest": d} for r, p, v, d in states)]
    )


UNFAILED = ((0, 10, 0, "a"), (0, 10, 1, "b"), (1, 11, 0, "c"), (1, 11, 1, "d"))


def test_an_unfailed_account_passes():
    account = told(*UNFAILED)
    account.check_same_as(REFERENCE)
    account.check_ranks([], world_size=2)
    assert account.steps_repeated() == 0


def test_a_wrong_state_is_found_even_if_a_later_one_is_right():
    with pytest.raises(AssertionError, match=r"rank 1 .pid 11. at version 1"):
        told((1, 11, 1, "x"), *UNFAILED).check_same_as(REFERENCE)


def test_a_state_that_was_never_reached_is_reported():
    with pytest.raises(AssertionError, match="never reached"):
        told(*UNFAILED[:3]).check_same_as(REFERENCE)


def test_a_second_holder_of_a_rank_is_counted():
    account = told(*UNFAILED, (1, 12, 1, "d"))
    account.check_ranks([1], world_size=2)
    with pytest.raises(AssertionError):
        account.check_ranks([], world_size=2)


def test_a_process_that_held_two_ranks_is_seen():
    with pytest.raises(AssertionError, match="two ranks"):
        told((0, 10, 0, "a"), (1, 10, 0, "c")).check_ranks([], world_size=2)


def test_steps_run_again_are_counted_per_process():
    assert told((0, 10, 5, "a"), (0, 10, 3, "b"), (1, 11, 3, "c")).steps_repeated() == 2


def test_more_steps_may_be_repeated_only_if_snapshots_were_made_rarer():
    account = told((0, 10, 5, "a"), (0, 10, 3, "b"))
    rarer = {"type": "SetCaptureInterval", "worker": 0, "interval": 2}
    account.check_steps_repeated([rarer, {"type": "ReportIncident", "incident": {"steps_repeated": 6}}])
    with pytest.raises(AssertionError, match="2 steps were repeated"):
        account.check_steps_repeated([])
    with pytest.raises(AssertionError, match=r"\[7\] in each repair"):
        account.check_steps_repeated([rarer, {"type": "ReportIncident", "incident": {"steps_repeated": 7}}])


def test_a_process_left_behind_is_found_by_its_mark():
    mark = f"planted-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"],
        env={**os.environ, processes.MARK: mark},
        stdout=subprocess.PIPE,
    ) as planted:
        assert planted.stdout is not None
        planted.stdout.readline()
        assert list(processes.marked(mark)) == [planted.pid]
        assert processes.wait_gone(mark, 0)
        processes.kill_marked(mark)
    assert not processes.marked(mark)


@pytest.mark.parametrize(
    ("leak", "seen"),
    [
        ("os.memfd_create('left')", "descriptors that the test left open"),
        ("socket.socketpair()[0].detach()", "descriptors that the test left open"),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "threads that the test left running"),
        ("subprocess.Popen(['true'])", "children that the test did not wait for"),
        ("None", None),
    ],
)
def test_a_leak_of_a_test_fails_it(pytester, leak, seen):
    tests = Path(__file__).parent.parent
    fixtures = (tests / "conftest.py").read_text(encoding="utf-8")
    pytester.makeconftest(f"import sys; sys.path.insert(0, {str(tests)!r})\n{fixtures}")
    pytester.makepyfile(f"import os, socket, subprocess, threading\nkept = []\ndef test(): kept.append({leak})")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1 if seen else 0)
    if seen:
        result.stdout.fnmatch_lines([f"*{seen}*"])
