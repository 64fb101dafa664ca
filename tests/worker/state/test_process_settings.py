"""Settings of the whole process that a script changes while it trains."""

import decimal
import os
from pathlib import Path

import pytest
import torch

from deadpool_run.errors import RefusedError
from deadpool_run.worker.codec import copied
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.state.process_settings import _SETTINGS, ProcessSettings

CHANGES = {
    "dtype": lambda: torch.set_default_dtype(torch.bfloat16),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic": lambda: torch.use_deterministic_algorithms(mode=True, warn_only=True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(not torch.backends.cuda.flash_sdp_enabled()),
    "memory-efficient attention": lambda: torch.backends.cuda.enable_mem_efficient_sdp(
        not torch.backends.cuda.mem_efficient_sdp_enabled()
    ),
    "math attention": lambda: torch.backends.cuda.enable_math_sdp(not torch.backends.cuda.math_sdp_enabled()),
    "cudnn": lambda: setattr(torch.backends.cudnn, "enabled", not torch.backends.cudnn.enabled),
    "cudnn benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    "cudnn deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", not torch.backends.mkldnn.enabled),
    "names of groups": lambda: c10d.set_group_count(c10d.group_count() + 3),
    "decimal": lambda: setattr(decimal.getcontext(), "prec", 7),
    "directory": lambda: os.chdir("/"),
}


@pytest.fixture
def settings():
    """They are as before at the end."""
    found = ProcessSettings()
    found.begin()
    yield found
    found.put({})


def test_each_is_tested():
    assert CHANGES.keys() == _SETTINGS.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_comes_back_and_one_that_was_changed_later_is_as_before(name, settings):
    before = settings.take()
    CHANGES[name]()
    after = copied(settings.take())
    assert list(after) == [name]
    settings.put(before)
    assert settings.take() == {}
    settings.put(after)
    assert settings.take() == after


def test_settings_of_the_setup_are_left_alone(settings):
    """A machine may have more threads than the one on which a snapshot was taken."""
    torch.set_num_threads(torch.get_num_threads() + 1)
    later = ProcessSettings()
    later.begin()
    threads = torch.get_num_threads()
    later.put({"dtype": "float64"})
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, torch.float64)


def test_a_directory_that_is_missing_here_is_named(settings, tmp_path):
    with pytest.raises(RefusedError, match=r"working directory to .*elsewhere.*No such file"):
        settings.put({"directory": str(tmp_path / "elsewhere")})


def test_a_directory_that_was_removed_is_no_error(settings, tmp_path):
    here = Path.cwd()
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert settings.take() == {"directory": None}
    settings.put(settings.take())
    os.chdir(here)


def test_the_next_group_gets_no_name_that_is_in_use(monkeypatch):
    """A step that is undone may have made one that it keeps."""
    monkeypatch.setattr(c10d.distributed_c10d, "_group_count", 9)
    monkeypatch.setattr(c10d.distributed_c10d, "_pg_names", {object(): "0", object(): "6", object(): "of a hash"})
    c10d.set_group_count(4)
    assert c10d.group_count() == 7
    c10d.set_group_count(8)
    assert c10d.group_count() == 8
