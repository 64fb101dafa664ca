"""The plan of a chaos run, from words and from a file, and the plans that are refused."""

import pytest

from deadpool_run.agent.chaos.plan import PlannedFault
from deadpool_run.agent.chaos.victims import Victims
from deadpool_run.cli.options.chaos_plan import Limits, read_plan
from deadpool_run.core.injection import KillHow, Slowness
from deadpool_run.errors import UsageError

LIMITS = Limits(4, has_spares=True, finds_hangs=True, nodes=2)


def plan(value, limits=LIMITS):
    return read_plan(str(value), 99, limits)


def test_words_name_what_fails_how_and_when():
    made = plan("kill every 60s; kill rank 1 with hang,sigkill every 30s-90s count 3; kill a spare at step 40; seed 7")
    assert made.seed == 7
    assert made.faults == (
        PlannedFault(Victims(drawn=True), every_s=(60.0, 60.0)),
        PlannedFault(Victims(rank=1), (KillHow.HANG, KillHow.SIGKILL), (30.0, 90.0), count=3),
        PlannedFault(Victims(spare=True), at_step=40),
    )
    assert plan("kill with oom,exit every 1m").faults[0].hows == (KillHow.OOM, KillHow.EXIT)
    assert plan("kill with slow:2.5 for 30s every 1m").faults[0].hows == (Slowness(2.5, 30.0),)
    assert plan("kill rank 1 with slow:3,exit at step 9").faults[0].hows == (Slowness(3.0, 60.0), KillHow.EXIT)
    assert plan("kill the agent of node a at step 9").faults[0].victims == Victims(node="a", agent=True)
    assert plan("kill agent every 1m").faults[0].victims == Victims(drawn=True, agent=True)
    assert plan("kill node a every 1m").faults[0].victims == Victims(node="a")
    assert plan("kill every 60s").seed == 99


def test_a_file_says_the_same(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "seed: 7\nfaults:\n  - every: 60s\n  - {rank: 1, how: [hang, sigkill], every: 30s-90s, count: 3}\n"
        "  - spare: true\n    at_step: 40\n"
    )
    assert plan(path) == plan(
        "seed 7; kill every 60s; kill rank 1 with hang,sigkill every 30s-90s count 3; kill spare at step 40"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("kill evry 60s", "did you mean `every`?"),
        ("kill every", "`every` needs a value"),
        ("kill every soon", "'soon': not a time"),
        ("kill every 90s-30s", "not a time, or times from the least to the most"),
        ("kill", "no time for the fault"),
        ("kill rank 4 every 60s", "write a rank from 0 to 3"),
        ("kill rank 1 spare every 60s", "`rank` and `spare` exclude each other"),
        ("kill with nuke every 60s", "write one of sigkill,"),
        ("kill with slow:1 every 60s", "the factor must be above 1 and at most 100"),
        ("kill with slow:fast every 60s", "'slow:fast': not a factor"),
        ("kill with slow:nan every 60s", "the factor must be above 1"),
        ("kill with slow:2 for ever every 60s", "'ever': not a duration"),
        ("kill with slow:2 for 2d every 60s", "the time at most a day"),
        ("kill for 60s every 60s", "only a slow rank has a time"),
        ("kill spare with slow:2 every 60s", "a spare has no steps to slow"),
        ("kill agent rank 1 every 60s", "`agent` and `rank` exclude each other"),
        ("kill agent with hang every 60s", "`agent` and `how` exclude each other"),
        ("kill rank 1 phase lunch every 60s", "not a phase"),
        ("kill at step 4 count 2", "a count needs `every`"),
        ("kill every 60s; murder", "a part begins with `kill`"),
        ("seed 7", "no fault in this plan"),
        ("nosuch.yaml", "cannot be read: No such file"),
    ],
)
def test_words_that_are_not_right_are_refused(words, why):
    with pytest.raises(UsageError) as refused:
        plan(words)
    assert why in str(refused.value)
    assert "\n" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("faults:\n  - every: 60s\n    hows: exit\n", "line 3: `hows` is not known here\ndid you mean `how`?"),
        ("seed: x\nfaults:\n  - every: 60s\n", "line 1: seed 'x': seed is a whole number"),
        ("faults:\n  - rank: 1\n", "line 2: no time for the fault"),
        ("faults:\n  - every: 60s\n  - every: 0s\n", "line 3: every '0s': not a time"),
        ("faults:\n  - every: {a: 1}\n", "line 2: every: not a value"),
        ("faults:\n  every: 60s\n", "line 1: faults: not a list"),
        ("faults:\n  - kill\n", "line 2: not a mapping"),
        ("faults:\n  - every: 60s\n    every: 30s\n", "line 3: `every` appears twice"),
        ("faults: [\n", "not YAML"),
        ("", "line 1: not a mapping"),
        ("faults: []\n", "no fault in this plan"),
    ],
)
def test_a_file_that_is_not_right_is_refused_with_the_line(tmp_path, text, why):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        plan(path)
    assert why in str(refused.value)


def test_a_plan_must_fit_the_job():
    bare = Limits(4, has_spares=False, finds_hangs=False)
    for words, why in (
        ("kill agent every 60s", "one machine"),
        ("kill spare every 60s", "no spares"),
        ("kill with hang every 60s", "--hang-timeout 0"),
    ):
        with pytest.raises(UsageError, match=why):
            plan(words, bare)
