"""Runs the command of --on-repair after each repair: without a shell, one at a time, with the incident in its environment.

The command line contains nothing of the incident, because causes quote text that the script has raised.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deadpool_run.agent.console import tell
from deadpool_run.agent.processes.children import Exit
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.records.incident_line import short_line, total_s
from deadpool_run.coordinator.sink import Sink
from deadpool_run.core.effects import Incident
from deadpool_run.wire.typed import to_json

LIMIT_S = 60.0
"""Time limit for the command."""
_MOST_WAITING = 16
_NOT_PASSED_ON = ("DEADPOOL_TOKEN",)


def incident_environment(incident: Incident, run_id: str, run_dir: Path) -> dict[str, str]:
    """Return the variables of the command."""
    return {
        "DEADPOOL_RUN_ID": run_id,
        "DEADPOOL_RUN_DIR": str(run_dir),
        "DEADPOOL_INCIDENT_ID": str(incident.epoch),
        "DEADPOOL_INCIDENT_TEXT": short_line(incident),
        "DEADPOOL_INCIDENT_RANKS": ",".join(str(loss.rank) for loss in incident.losses),
        "DEADPOOL_INCIDENT_CAUSES": "\n".join(loss.cause for loss in incident.losses).replace("\0", " "),
        "DEADPOOL_INCIDENT_INJECTED": str(int(all(loss.injected for loss in incident.losses))),
        "DEADPOOL_INCIDENT_PLANNED": str(int(incident.planned)),
        "DEADPOOL_INCIDENT_SECONDS": f"{total_s(incident):.3f}",
        "DEADPOOL_INCIDENT_RESUMED_STEP": str(incident.resumed),
        "DEADPOOL_INCIDENT_STEPS_REPEATED": str(incident.steps_repeated),
        "DEADPOOL_INCIDENT_JSON": to_json(incident).decode(errors="replace"),
    }


class RepairCommand:
    """The command of one run, in the running loop. A thread starts it, because the disk with the program may hang."""

    def __init__(self, command: Sequence[str], parent: ForkServer, outer: Mapping[str, str]) -> None:
        """`outer` is the environment that the command inherits."""
        self._command, self._parent = tuple(command), parent
        self._outer = {name: value for name, value in outer.items() if name not in _NOT_PASSED_ON}
        self._loop = asyncio.get_running_loop()
        self._sink = Sink("deadpool-on-repair", stays=False)
        self._waiting: deque[dict[str, str]] = deque()
        self._is_busy = False

    def run(self, variables: Mapping[str, str]) -> None:
        """Queue the command. Queued commands run one after another."""
        if len(self._waiting) >= _MOST_WAITING:
            self._complain(f"is not run for incident {variables['DEADPOOL_INCIDENT_ID']}: {_MOST_WAITING} wait for it")
            return
        self._waiting.append({**self._outer, **variables})
        self._next()

    def close(self) -> None:
        """Start no further command. A running one may take as long as the processes of the job."""
        self._waiting.clear()
        self._sink.close(0.0)

    def _next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        environment = self._waiting.popleft()
        self._is_busy = True
        self._parent.expect()
        if not self._sink.put(lambda: self._spawn(environment)):
            self._not_started("this machine has no process left")

    def _spawn(self, environment: Mapping[str, str]) -> None:
        """Start the command. For the sink's thread."""
        try:
            pid = os.posix_spawnp(
                self._command[0],
                self._command,
                environment,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
                setsigmask=[],
            )
        except (OSError, ValueError) as error:
            self._soon(self._not_started, str(error))
        else:
            self._soon(self._started, pid)

    def _soon(self, function: Callable[..., None], argument: str | int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the process with it
            self._loop.call_soon_threadsafe(function, argument)

    def _started(self, pid: int) -> None:
        self._parent.adopt(pid, self._ended).kill_after(LIMIT_S)

    def _not_started(self, why: str) -> None:
        self._parent.unexpect()
        self._complain(f"cannot be run: {why}")
        self._go_on()

    def _ended(self, end: Exit) -> None:
        if end.code:
            self._complain(f"ended with exit code {end.code}")
        elif end.signal is not None:
            self._complain(f"was ended by {signal.Signals(end.signal).name}")
        self._go_on()

    def _go_on(self) -> None:
        self._is_busy = False
        self._next()

    def _complain(self, what: str) -> None:
        tell(f"--on-repair: {self._command[0]} {what}", level="warning", event="on_repair_failed")
