"""The conformance suite of `doctor --gpu`: whether the library for collectives on GPUs behaves as repairs need it.

Two processes run a program for each behaviour; `worker/check/conformance.py` has the programs.
"""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deadpool_run.cli.check.run import end_of
from deadpool_run.cli.doctor.findings import Finding, Grade, without_options

STATEMENTS: Mapping[str, str] = {
    "barrier": "barriers go to the device",
    "recorded": "a replacement rehearses with what synchronous and coalesced collectives received",
    "stuck": "several stuck communicators are aborted together",
    "coalescing": "a coalescing that an abort cuts does not disturb later calls",
    "ends-first": "a rank that ends first interrupts no other rank",
    "recovers-often": "twenty repairs leave nothing in memory",
    "lost-peer": "a collective whose peer is lost ends with the abort",
    "destroys": "an abort frees a rank that destroys a group",
}
"""By names of programs."""
PROGRAM = (sys.executable, "-P", "-m", "deadpool_run.worker.check.conformance")
_SIZE = 2
_LINES_SHOWN = 6
_END_S = 1.0


def conform(environment: Mapping[str, str], timeout_s: float, program: Sequence[str] = PROGRAM) -> Iterator[Finding]:
    """Yield whether each behaviour was seen. Each may take `timeout_s`."""
    env = without_options(environment)
    for name, statement in STATEMENTS.items():
        with tempfile.TemporaryDirectory(prefix="deadpool-doctor-", ignore_cleanup_errors=True) as folder:
            why = _failure(name, env, timeout_s, program, Path(folder))
        text = statement if not why else f"not seen: {statement}\n{why}"
        yield Finding(Grade.BAD if why else Grade.OK, name, text)


def _failure(name: str, env: Mapping[str, str], timeout_s: float, program: Sequence[str], folder: Path) -> str:
    """Return how the two processes of a program failed, with their last lines; empty if they did not."""
    deadline = time.monotonic() + timeout_s
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        port = listener.getsockname()[1]
        ranks = []
        for rank in range(_SIZE):
            serves = rank == 0
            output = stack.enter_context((folder / f"rank{rank}").open("w+b"))
            process = subprocess.Popen(  # noqa: S603 - our own
                [*program, name, str(rank), str(port), *([str(listener.fileno())] if serves else [])],
                stdin=subprocess.PIPE if serves else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=[listener.fileno()] if serves else [],
            )
            stack.callback(process.kill)
            ranks.append(process)
        first, second = ranks
        second_code = end_of(second, deadline - time.monotonic(), _END_S)
        assert first.stdin is not None
        first.stdin.close()  # it serves the store until then
        codes = [end_of(first, max(0.0, deadline - time.monotonic()), _END_S), second_code]
    lines = []
    for rank, code in enumerate(codes):
        if code != 0:
            said = (folder / f"rank{rank}").read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
            how = f"did not end within {timeout_s:g} s" if code is None else f"ended with exit code {code}"
            lines += [f"    rank {rank} {how}; its last lines:", *(f"      {line}" for line in said)]
    return "\n".join(lines)
