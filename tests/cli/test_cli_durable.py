"""The options for durable checkpoints: their meaning and errors."""

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_run.cli.cluster.spec_builder import plan
from deadpool_run.cli.commands.launch import resolved
from deadpool_run.cli.launch.dry_run import settings_lines
from deadpool_run.cli.options.machine import Surroundings
from deadpool_run.errors import UsageError
from deadpool_run.text import without_passwords
from deadpool_run.wire.checkpoints import DurableSpec

HERE = Surroundings(
    environment={},
    cpus=4,
    gpus=0,
    host_names=frozenset({"localhost"}),
    state_dir=Path("/state"),
    fresh_run_id="fresh",
)


def durable(environment=None, **given):
    return plan(resolved({"no_config": True, **given}, environment or {}), ("train.py",), HERE).spec.durable


def test_without_a_place_nothing_is_durable():
    assert durable() is None
    assert durable({"DEADPOOL_DURABLE_EVERY": "5"}) is None


def test_of_several_machines_the_world_is_told_that_it_can_begin_from_the_disk():
    several = {"no_config": True, "nnodes": "2", "rdzv_endpoint": "host:29400"}
    here = replace(HERE, token=lambda _: b"secret")
    spec = plan(resolved({**several, "durable": "kept"}, {}), ("train.py",), here).spec
    assert spec.durable is not None
    assert spec.settings.durable
    assert not plan(resolved(several, {}), ("train.py",), here).spec.settings.durable
    assert not plan(resolved({**several, "resume": "old"}, {}), ("train.py",), here).spec.settings.durable


def test_defaults():
    place = str(Path("kept").absolute())
    assert durable(durable="kept") == DurableSpec(
        target=place, every_steps=None, every_s=600.0, keep=2, resume="auto", timeout_s=1800.0, exit_on_usr1=True
    )


@pytest.mark.parametrize(
    ("text", "steps", "seconds"), [("100", 100, None), ("10m", None, 600.0), ("0.5m", None, 30.0), ("2h", None, 7200.0)]
)
def test_steps_or_time(text, steps, seconds):
    found = durable(durable="kept", durable_every=text)
    assert (found.every_steps, found.every_s) == (steps, seconds)


def test_urls_stay_as_they_are():
    assert durable(durable="s3://bucket/run").target == "s3://bucket/run"
    assert durable(durable="kept", resume="s3://bucket/run/step-00000012").resume == "s3://bucket/run/step-00000012"


@pytest.mark.parametrize("password", ["secret", "secret:2@x", ""])
def test_passwords_of_urls_are_not_shown(password):
    given = {
        "durable": f"ftp://me:{password}@host/run",
        "resume": f"cached::ftp://me:{password}@host/run/step-00000012",
    }
    values = resolved({"no_config": True, **given}, {})
    assert values.text("durable") == given["durable"]
    shown = {line.split()[0]: line.split()[1] for line in settings_lines(values)}
    assert (shown["durable"], shown["resume"]) == (
        "ftp://me:***@host/run",
        "cached::ftp://me:***@host/run/step-00000012",
    )


def test_urls_without_a_password_are_shown_as_they_are():
    for url in ("s3://bucket/run", "ftp://me@host/run", "etcd://h:1,g:2/x", "http://[::1]:80/a:b@c"):
        assert without_passwords(url) == url


def test_one_to_begin_from_needs_no_place_to_write_to():
    found = durable(resume="old/step-00000012")
    assert (found.target, found.resume) == ("", str(Path("old/step-00000012").absolute()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"durable_every": "0"}, "--durable-every '0': not a number of steps or a time"),
        ({"durable_every": "0m"}, "--durable-every '0m': not a number of steps or a time"),
        ({"durable_every": "-5"}, "--durable-every '-5': not a number of steps or a time"),
        ({"durable_every": "10w"}, "--durable-every '10w': not a number of steps or a time"),
        ({"durable_every": "m"}, "--durable-every 'm': not a number of steps or a time"),
        ({"durable_keep": "0"}, "--durable-keep '0': too small"),
        ({"durable_keep": "two"}, "--durable-keep 'two': not a whole number"),
        ({"durable_timeout": "0"}, "--durable-timeout '0': not a positive duration"),
        ({"resume": ""}, "--resume '': empty"),
        ({"on_usr1": "stop"}, "--on-usr1 'stop': not one of its values"),
    ],
)
def test_bad_values_are_refused(given, said):
    with pytest.raises(UsageError) as refused:
        durable(durable="kept", **given)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("name", ["durable_every", "durable_keep", "durable_timeout", "on_usr1"])
def test_what_needs_a_place_to_write_to_is_refused_without_one(name):
    value = {"durable_every": "5", "durable_keep": "3", "durable_timeout": "60", "on_usr1": "save"}[name]
    with pytest.raises(UsageError, match="name one with --durable"):
        durable(**{name: value})
