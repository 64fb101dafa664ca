"""Whose fault an exception is that ended the script, judged by its kind and by the frames it came through."""

import runpy
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, TracebackType

from deadpool_run.errors import AttachError, Blame, DeadpoolError, ProtocolError, RefusedError, ScriptError

_OURS = str(Path(__file__).parents[2])
_PASS_ON = frozenset(
    f"{_OURS}/{name}.py"
    for name in (
        "worker/compat/c10d",
        *(f"worker/groups/{part}" for part in ("backend", "collectives", "gloo", "group", "nccl", "registry", "works")),
        "worker/loop/batches",
        "worker/process/bootstrap",
        *(f"integrations/{part}" for part in ("accelerate", "driver", "huggingface", "lightning", "seekable")),
    )
)
"""Modules that call what is the user's (a loader, a callback), or have a library refuse what the user gave it."""
_SLIPS = (AssertionError, AttributeError, KeyError, NameError)
"""Kinds that no library refuses arguments by: raised in one of those modules themselves, they are our own."""
_LIBRARIES = tuple(sorted({str(Path(path).resolve()) for path in sysconfig.get_paths().values()}))
_NETWORK = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
_LONGEST_CHAIN = 100
"""Exceptions that were raised because of each other are looked through up to this many."""


def refusal(error: BaseException, *, replacement: bool) -> ScriptError | None:
    """Return why the library refuses to go on, if that is what the script ends by.

    A refusal counts even if the script raised something else because of it. Any other misuse counts where the script
    runs for real: in a rehearsal it may be of what is fake there.
    """
    found: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if isinstance(found, RefusedError):
            return found
        if found is None:
            break
        found = found.__cause__ or found.__context__
    return error if isinstance(error, ScriptError) and not replacement else None


def blame(error: BaseException) -> Blame:
    """Return who is to blame: the one whose frame is innermost, among the script's and ours.

    Frames of other libraries are passed over, and those of our modules that only pass on what is the user's.
    """
    if isinstance(error, DeadpoolError):
        return Blame.OURS if isinstance(error, ProtocolError | AttachError) else Blame.SCRIPT
    codes = list(_codes(error.__traceback__))
    for depth, code in enumerate(reversed(codes)):
        name = code.co_filename
        if not name.startswith(_OURS + "/"):
            if not _is_library(name):
                return Blame.SCRIPT
        elif name not in _PASS_ON or (depth == 0 and isinstance(error, _SLIPS)):
            return Blame.NOBODY if _is_of_the_machine(error) else Blame.OURS
    return Blame.SCRIPT


def _codes(frames: TracebackType | None) -> Iterator[CodeType]:
    while frames is not None:
        yield frames.tb_frame.f_code
        frames = frames.tb_next


def _is_library(name: str) -> bool:
    """Tell whether the file is neither the script's nor ours: installed, frozen, or made of a string."""
    return name.startswith((*_LIBRARIES, "<")) or "site-packages" in name or name == runpy.__file__


def _is_of_the_machine(error: BaseException) -> bool:
    """Tell whether the network or the machine failed, whoever noticed."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OSError | MemoryError) or bool(kinds & _NETWORK)
