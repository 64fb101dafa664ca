"""Blame for an exception that ended the script, by its type and the frames in its traceback."""

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from deadpool_run.errors import AttachError, Blame, DeadpoolError, ProtocolError, RefusedError, ScriptError
from deadpool_run.worker.process.script_files import is_library

_OURS = str(Path(__file__).parents[2])
_PASS_ON = frozenset(
    f"{_OURS}/{name}.py"
    for name in (
        "worker/compat/c10d",
        "worker/compat/patches",
        *(f"worker/device/{part}" for part in ("channel", "nccl")),
        *(f"worker/groups/{part}" for part in ("backend", "collectives", "gloo", "group", "registry", "works")),
        "worker/loop/batches",
        "worker/process/bootstrap",
        *(f"integrations/{part}" for part in ("accelerate", "driver", "huggingface", "lightning", "seekable")),
    )
)
"""Our modules that call user code (a loader, a callback), or pass user arguments to a library that may reject them."""
_SLIPS = (AssertionError, AttributeError, KeyError, NameError)
"""No library rejects arguments with these: raised in one of those modules itself, they are our bug."""
_DEVICE_FAILED = re.compile(
    r"uncorrectable ECC error encountered|uncorrectable NVLink error detected|device\(s\) is/are busy or unavailable"
)
"""CUDA's messages if the GPU itself failed (cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable), or nobody may use it
(cudaErrorDevicesUnavailable). Its other errors may come of a kernel of the script."""
_LONGEST_CHAIN = 100
"""Up to this many chained exceptions are searched."""


def refusal(error: BaseException, *, replacement: bool) -> ScriptError | None:
    """Return the error by which the library stopped the job; None if the script failed for another reason.

    A `RefusedError` counts even if the script raised something else because of it. Any other `ScriptError` counts only in a
    real run: in a rehearsal, fake results may have caused it.
    """
    refused = (each for each in chained(error) if isinstance(each, RefusedError))
    return next(refused, error if isinstance(error, ScriptError) and not replacement else None)


def chained(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its cause, the cause of that ..."""
    found: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__


def blame(error: BaseException) -> Blame:
    """Return the owner of the innermost frame, among the script's frames and ours.

    Frames of other libraries, and of our modules that only pass on user code or arguments, are skipped.
    """
    if isinstance(error, AttachError):
        return Blame.NOBODY  # a peer was lost, or the network failed
    if isinstance(error, RuntimeError) and _DEVICE_FAILED.search(str(error)):
        return Blame.DEVICE
    if isinstance(error, DeadpoolError):
        return Blame.OURS if isinstance(error, ProtocolError) else Blame.SCRIPT
    names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    for depth, name in enumerate(reversed(names)):
        if not name.startswith(_OURS + "/"):
            if not is_library(name):
                return Blame.SCRIPT
        elif name not in _PASS_ON or (depth == 0 and isinstance(error, _SLIPS)):
            return Blame.NOBODY if _is_environmental(error) else Blame.OURS
    return Blame.SCRIPT


def _is_environmental(error: BaseException) -> bool:
    # The network or the machine failed, whichever code noticed. Torch's errors by name, because importing torch is slow.
    return isinstance(error, OSError | MemoryError) or "DistError" in {kind.__name__ for kind in type(error).__mro__}
