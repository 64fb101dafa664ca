"""Settings of the whole process that change what a step computes: torch's, the decimal context and the working directory.

A script may change them in its loop, for example the default dtype after a warm-up. Settings that have not changed since the
loop began are neither kept nor set: machines may differ in them. The number from which torch makes the name of the next process group
counts as a setting: a replacement has made fewer groups, and members find each other by the name.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deadpool_run.errors import RefusedError
from deadpool_run.worker.compat import c10d


@dataclass(frozen=True, slots=True)
class _Setting:
    """Plain values. `read` returns None if there is none at the moment."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


class ProcessSettings:
    """The settings that the main thread has changed since `begin`."""

    def __init__(self) -> None:
        self._at_begin: dict[str, Any] = {}

    def begin(self) -> None:
        """Note all settings, as the loop begins."""
        self._at_begin = {name: setting.read() for name, setting in _SETTINGS.items()}

    def take(self) -> dict[str, Any]:
        """Return the settings that have changed. Takes a few microseconds."""
        return {
            name: present for name, before in self._at_begin.items() if (present := _SETTINGS[name].read()) != before
        }

    def put(self, changed: dict[str, Any]) -> None:
        """Set all as they were at `take`. Raises `RefusedError` if this machine lacks the working directory."""
        for name, before in self._at_begin.items():
            setting, then = _SETTINGS[name], changed.get(name, before)
            if then is not None and setting.read() != then:
                setting.write(then)


def use_threads_of_script(before: str) -> None:
    """Use as many threads as the script has set in `OMP_NUM_THREADS`. `before` is its value as the script began.

    It is read when torch is imported, which a forked worker did before the script. A number that the script has given to torch stays.
    """
    now = os.environ.get("OMP_NUM_THREADS", "")
    if now != before and now.isdecimal() and int(now) and before in ("", str(torch.get_num_threads())):
        torch.set_num_threads(int(now))


def _dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _set_dtype(name: str) -> None:
    torch.set_default_dtype(getattr(torch, name))


def _deterministic() -> list[bool]:
    return [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()]


def _set_deterministic(values: list[bool]) -> None:
    mode, warn_only = values
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the script uses torch's newer switches for this
        return None


def _decimal() -> list[Any] | None:
    module = sys.modules.get("decimal")
    if module is None:
        return None
    context = module.getcontext()
    return [context.prec, context.rounding]


def _set_decimal(values: list[Any]) -> None:
    context = sys.modules["decimal"].getcontext()
    context.prec, context.rounding = values


def _directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - text, and at each step
    except OSError:  # it was removed
        return None


def _set_directory(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as error:
        raise RefusedError(
            f"the script has changed its working directory to {path!r}, which cannot be entered here: {error.strerror}.\n"
            "Create it on every machine before the step loop, or use absolute paths."
        ) from error


def _flag(holder: Any, name: str) -> _Setting:
    return _Setting(partial(getattr, holder, name), partial(setattr, holder, name))


_cuda, _cudnn, _mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
_SETTINGS: dict[str, _Setting] = {
    "dtype": _Setting(_dtype, _set_dtype),
    "threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "deterministic": _Setting(_deterministic, _set_deterministic),
    "matmul precision": _Setting(_matmul_precision, torch.set_float32_matmul_precision),
    "flash attention": _Setting(_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "memory-efficient attention": _Setting(_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "math attention": _Setting(_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "cudnn": _flag(_cudnn, "enabled"),
    "cudnn benchmark": _flag(_cudnn, "benchmark"),
    "cudnn deterministic": _flag(_cudnn, "deterministic"),
    "mkldnn": _flag(_mkldnn, "enabled"),
    "names of groups": _Setting(c10d.group_count, c10d.set_group_count),
    "decimal": _Setting(_decimal, _set_decimal),
    "directory": _Setting(_directory, _set_directory),
}
