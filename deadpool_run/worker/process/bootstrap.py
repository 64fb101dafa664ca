"""Entry point of a worker: waits parked for a rank, then runs the user's script as `__main__`."""

import builtins
import contextlib
import importlib.machinery
import io
import json
import linecache
import os
import pkgutil
import runpy
import socket
import sys
import time
import tokenize
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from deadpool_run.core.events import JobRefused, PrepareFailed, WorkerRaised, WorkerReady
from deadpool_run.errors import RefusedError, RunLeft, ScriptError
from deadpool_run.text import clipped
from deadpool_run.wire.messages import THIS_WORKER, ScriptTraceback, encode
from deadpool_run.worker import prefault
from deadpool_run.worker.practice import practice
from deadpool_run.worker.process import rerun, script_files, session, sources, stacks
from deadpool_run.worker.process.agent_link import park
from deadpool_run.worker.process.blame import blame, chained, refusal

_STOP_S = 0.5
"""How long after an interruption the order to stop may come."""
_OURS = f"{Path(__file__).parents[2]}/"
_NOT_THE_SCRIPTS = frozenset({__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib.util>"})


def main(control_fd: int) -> None:
    """Wait for a rank, then run the script as it. Returns when the script does; raises SystemExit with its code."""
    sys.excepthook = _except_hook
    control = socket.socket(fileno=control_fd)
    control.sendall(encode(WorkerReady(THIS_WORKER)))
    prefault.wait(control)
    given = park(control)
    if given is None:
        raise SystemExit(0)
    assign, fds = given
    assign.env["DEADPOOL_CONTROL_FD"] = str(control_fd)
    session.assume(assign, fds)
    stacks.install()
    target = json.loads(assign.env["DEADPOOL_TARGET"])
    argv = _argv(target["argv"], assign.local_rank)
    control.detach()
    if target["mode"] == "exec":
        _execute(argv, [control_fd, *fds])
    _write_whole_lines()
    sys.argv[:] = argv
    sys.path[0] = str(Path.cwd() if target["mode"] == "module" else Path(argv[0]).resolve().parent)
    script_files.note_script(target["mode"], argv[0])
    worker = session.current()
    worker.link.reentrant = True
    if worker.preparing:
        worker.link.preparing = worker.rank
    baseline = rerun.ProcessBaseline()
    sources.begin(copied=bool(target["copy"]))
    while not _run(target["mode"], argv[0], target["copy"], worker):
        rerun.leave(worker, baseline)
        sys.argv[:] = _argv(target["argv"], worker.local_rank)


def _argv(words: list[str], local_rank: int) -> list[str]:
    return [word.replace("${local_rank}", str(local_rank)) for word in words]


def _write_whole_lines() -> None:
    """Write standard output, unless it is a terminal, a line at a time.

    Unbuffered (`-u`), `print` writes a text and its line end separately, and lines of several ranks get mixed.
    """
    if not sys.stdout.isatty() and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _execute(argv: list[str], fds: list[int]) -> NoReturn:
    for fd in fds:
        if fd > 2:  # the standard streams are inherited anyway
            with contextlib.suppress(OSError):  # stdout's or stderr's own number, closed after its dup2
                os.set_inheritable(fd, True)
    try:
        os.execvpe(argv[0], argv, os.environ)  # noqa: S606 - running the user's program is the purpose
    except OSError as error:
        sys.stderr.write(f"deadpool-run: cannot execute {argv[0]!r}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _run(mode: str, target: str, copy: str, worker: session.Session) -> bool:
    """Run the script; False if it has to run again, because its interrupted step could not be aborted."""
    ours = sys.modules["__main__"]
    try:
        if worker.replacement or worker.resume >= 0:
            practice.begin()
        _run_once(mode, target, copy, worker)
    except RunLeft:
        sys.modules["__main__"] = ours  # the script's module holds the model: drop it before the next one is made
        return False
    return True


def _run_once(mode: str, target: str, copy: str, worker: session.Session) -> None:
    try:
        if mode == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_file(target, copy)
        if worker.loss_pending():
            worker.report_and_wait("it ended")
    except SystemExit as leaving:
        if worker.loss_pending():
            worker.report_and_wait(leaving)
        # A framework may have turned the refusal into an exit.
        if leaving.code and (refused := refusal(leaving, replacement=worker.replacement)) is not None:
            worker.link.send(_script_refused(refused))
            raise SystemExit(refused.exit_code) from None
        raise
    except Exception as error:  # noqa: BLE001 - whatever the script raises is reported, then ends the process
        if worker.loss_pending():
            worker.report_and_wait(error)
        refused = refusal(error, replacement=worker.replacement)
        _report(error, refused, worker)
        raise SystemExit(1 if refused is None else refused.exit_code) from None


def _run_file(target: str, copy: str) -> None:
    """Run TARGET as `python TARGET` does: `runpy` would change `sys.argv[0]`, and leave `__file__` relative.

    `copy` has what the file contained when the job began. Empty: the file itself is read.
    """
    where = os.path.abspath(target)  # noqa: PTH100 - Path.resolve() would follow links
    # A .pyc file, or a folder or archive with a __main__.py.
    if target.endswith(".pyc") or pkgutil.get_importer(where) is not None:
        runpy.run_path(target, run_name="__main__")
        return
    with io.open_code(copy or where) as file:
        content = file.read()
    code = compile(content, where, "exec", dont_inherit=True)
    # Tracebacks and inspect.getsource show these lines, whatever the file contains later: without a time, they stay.
    lines = io.TextIOWrapper(io.BytesIO(content), encoding=tokenize.detect_encoding(io.BytesIO(content).readline)[0])
    linecache.cache[where] = (len(content), None, lines.readlines(), where)
    main_module = ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", where)
    vars(main_module).update(__file__=where, __cached__=None, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = main_module
    exec(code, vars(main_module))  # noqa: S102 - running the user's program is the purpose


def _report(error: Exception, refused: ScriptError | None, worker: session.Session) -> None:
    """Report the script's exception once: to the user, to the agent, and in torchrun's error file."""
    whose = blame(error)
    _keep_script_frames(error)
    text = "".join(traceback.format_exception(error))
    if not (isinstance(error, RefusedError) and error.reported):  # the launcher prints that once, for all ranks
        _show(text, worker)
    if worker.preparing:
        broke = PrepareFailed(THIS_WORKER, clipped(f"{type(error).__name__}: {error}"))
        worker.link.send(broke if refused is None else _script_refused(refused))
        os._exit(1)  # it holds no rank
    _write_error_file(error, text)  # first: once the agent knows, it ends this process
    if refused is None:
        message, text = clipped(str(error)), clipped(text)
        worker.link.send(WorkerRaised(THIS_WORKER, worker.step, type(error).__name__, message, text, whose))
    else:
        worker.link.send(_script_refused(refused))


def _script_refused(refused: ScriptError) -> JobRefused:
    return JobRefused(THIS_WORKER, clipped(str(refused)), refused.exit_code)


def _write_error_file(error: Exception, text: str) -> None:
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and not Path(error_file).exists():
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        body = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        with contextlib.suppress(OSError):  # no space is left: the agent still learns of the exception
            Path(error_file).write_text(json.dumps(body), encoding="utf-8")


def _show(text: str, worker: session.Session) -> None:
    """Show a traceback: in the rank's own file, else by way of the agent, which prints one that all ranks have only once."""
    with contextlib.suppress(Exception):  # a script may have closed it
        sys.stdout.flush()  # what the script has printed before
    if worker.console and sys.stderr is sys.__stderr__:
        worker.link.send(ScriptTraceback(clipped(text)))
    else:
        sys.stderr.write(text)
        sys.stderr.flush()


def _keep_script_frames(error: BaseException) -> None:
    """Remove frames of ours and of runpy, before the script's first frame and after its misuse of the library."""
    for each in chained(error):
        each.__traceback__ = _script_frames(each.__traceback__)
        if isinstance(each, ScriptError):
            _cut_ours(each.__traceback__)
    if error.__traceback__ is None:  # runpy's own error, which has the message of its cause
        error.__cause__, error.__suppress_context__ = None, True


def _script_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames from the script's first on; None if there is none, as in a syntax error."""
    while frames is not None and frames.tb_frame.f_code.co_filename in _NOT_THE_SCRIPTS:
        frames = frames.tb_next
    return frames


def _cut_ours(frames: TracebackType | None) -> None:
    """Cut the frames of this package at the end, if there are others."""
    last = None
    while frames is not None:
        if not frames.tb_frame.f_code.co_filename.startswith(_OURS):
            last = frames
        frames = frames.tb_next
    if last is not None:
        last.tb_next = None


def _except_hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print what ends a worker, except the interruption by Ctrl-C that ends the job: the launcher tells of that."""
    parked = "DEADPOOL_WORKER" not in os.environ
    if not issubclass(kind, KeyboardInterrupt) or not (parked or session.current().link.orders.stops_within(_STOP_S)):
        sys.__excepthook__(kind, error, frames)
