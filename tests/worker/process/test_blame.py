"""Whose fault an exception is: judged by real tracebacks, through our own modules and torch's."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from deadpool_run.errors import AttachError, Blame, ProtocolError, RefusedError, ScriptError, SnapshotError, StepAborted
from deadpool_run.worker.loop.batches import Batches
from deadpool_run.worker.process.blame import _PASS_ON, blame, refusal
from deadpool_run.worker.process.script_files import is_library
from deadpool_run.worker.state import hooks


def raised(what):
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - of any kind
        what()
    return caught.value


def of_script(text):
    """Run this as a script's text in a file of its own would run; return what it raises."""
    return raised(lambda: exec(compile(text, "/home/user/train.py", "exec"), {}))


def beneath(module, error):
    """Return a function of one of our modules that calls what raises this."""
    code = compile("def call(what):\n    what()\ndef slip():\n    raise error", module.__file__, "exec")
    names = {"error": error}
    exec(code, names)
    return names


def test_each_module_that_passes_on_is_there():
    assert [name for name in _PASS_ON if not Path(name).is_file()] == []


def our(name):
    """Return a module of ours by its name, without importing it."""
    spec = importlib.util.find_spec(f"deadpool_run.{name}")

    class Found:
        __file__ = spec.origin

    return Found


def test_the_script_is_to_blame_for_what_it_raises_itself_and_what_libraries_raise_for_it():
    assert blame(of_script("1 / 0")) is Blame.SCRIPT
    assert blame(of_script("import json\njson.loads('{')")) is Blame.SCRIPT
    assert blame(of_script("import torch\ntorch.ones(2) @ torch.ones(3)")) is Blame.SCRIPT
    assert blame(raised(lambda: compile("x =", "train.py", "exec"))) is Blame.SCRIPT


def test_a_folder_whose_name_begins_as_a_librarys_is_the_scripts():
    assert is_library(f"{sys.prefix}/lib/module.py")
    assert not is_library(f"{sys.prefix}-jobs/train.py")


def test_we_are_to_blame_for_what_our_frames_raise_however_deep_in_a_library():
    assert blame(raised(beneath(hooks, AttributeError("_scale"))["slip"])) is Blame.OURS
    within = beneath(hooks, None)["call"]
    assert blame(raised(lambda: within(lambda: json.loads("{")))) is Blame.SCRIPT  # the lambda is of this test
    assert blame(raised(lambda: within(json.JSONDecoder().decode))) is Blame.OURS


def test_a_callback_of_the_script_is_the_scripts():
    names = {"call": beneath(hooks, None)["call"]}
    script = compile("def back():\n    1 / 0\ncall(back)", "/home/user/train.py", "exec")
    assert blame(raised(lambda: exec(script, names))) is Blame.SCRIPT


@pytest.mark.parametrize(
    "name", ["worker.groups.group", "worker.groups.works", "worker.compat.patches", "integrations.lightning"]
)
def test_modules_that_pass_on_are_passed_over_but_for_their_own_slips(name):
    refused = beneath(our(name), RuntimeError("invalid tensor size"))["slip"]
    assert blame(raised(refused)) is Blame.SCRIPT
    assert blame(raised(beneath(our(name), AttributeError("_works"))["slip"])) is Blame.OURS
    passed = beneath(our(name), None)["call"]
    assert blame(raised(lambda: passed(json.JSONDecoder().decode))) is Blame.SCRIPT


def test_a_loader_that_raises_is_the_scripts():
    class Bad(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, _):
            raise KeyError("sample")

    source = Batches(DataLoader(Bad(), batch_size=2), replay=False)
    error = raised(source.take)
    assert isinstance(error, KeyError)
    assert blame(error) is Blame.SCRIPT


def test_the_network_and_the_machine_are_nobodys_where_our_code_noticed():
    for error in (ConnectionResetError("x"), MemoryError("x"), dist.DistNetworkError("x"), AttachError("x")):
        assert blame(raised(beneath(hooks, error)["slip"])) is Blame.NOBODY
    assert blame(of_script("open('/no/such/file')")) is Blame.SCRIPT


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be", Blame.DEVICE),
        ("CUDA error: uncorrectable NVLink error detected during the execution", Blame.DEVICE),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", Blame.DEVICE),
        ("CUDA error: an illegal memory access was encountered", Blame.SCRIPT),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", Blame.SCRIPT),
    ],
)
def test_a_gpu_that_failed_is_nobodys_fault_wherever_it_shows(text, whose):
    error = torch.AcceleratorError(text) if hasattr(torch, "AcceleratorError") else RuntimeError(text)
    code = compile("raise error", "/home/user/train.py", "exec")
    assert blame(raised(lambda: exec(code, {"error": error}))) is whose


def test_errors_that_we_raise_on_purpose_name_who_is_to_blame():
    for error in (ScriptError("x"), RefusedError("x"), SnapshotError("x"), StepAborted("x")):
        assert blame(raised(beneath(hooks, error)["slip"])) is Blame.SCRIPT
    assert blame(raised(beneath(hooks, ProtocolError("x"))["slip"])) is Blame.OURS


def test_a_refusal_is_found_behind_what_the_script_made_of_it():
    direct = of_script("from deadpool_run.errors import RefusedError\nraise RefusedError('why')")
    assert refusal(direct, replacement=True) is direct
    for rest in ("raise ValueError('other')", "raise ValueError('other') from error", "import sys; sys.exit(1)"):
        error = of_script(
            "from deadpool_run.errors import RefusedError\n"
            f"try:\n    raise RefusedError('why')\nexcept Exception as error:\n    {rest}"
        )
        found = refusal(error, replacement=False)
        assert isinstance(found, RefusedError)
        assert found.exit_code == 94


def test_a_misuse_ends_the_job_unless_it_is_of_a_rehearsal():
    misuse = raised(beneath(hooks, ScriptError("called twice"))["slip"])
    assert refusal(misuse, replacement=False) is misuse
    assert refusal(misuse, replacement=True) is None
    assert refusal(ValueError("x"), replacement=False) is None
