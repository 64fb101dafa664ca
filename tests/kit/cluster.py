"""A real `deadpool-run` on this machine, and what a test does to it. There are no threads: a wait reads the job's output.

Every wait is for a readable descriptor (output, events of the training script, the agent's pidfd) and has a bound. Its
failure shows the job's last output.
"""

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from deadpool_run.vault.status_page import RankEntry, StatusPage
from kit.account import Account, Event, States
from kit.processes import MARK, kill_marked, marked, thread_names, wait_gone

SCRIPTS = Path(__file__).parent.parent / "process" / "scripts"
LAYOUTS = ("ddp", "ddp-full", "fsdp", "hsdp", "tp", "pp", "plain")
"""The arguments of `train.py --layout`."""
LINES_SHOWN = 60
STACKS_END = "in <module>\n"
START_TIMEOUT_S = 60.0
"""The longest time from the launch to an event of the first steps: two imports of torch on a busy machine."""


class Cluster:
    """One job on this machine. `home` is an empty folder."""

    def __init__(
        self,
        home: Path,
        *args: str,
        script: str | Path = "train.py",
        nproc: int = 4,
        spares: int = 1,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
        within: Callable[..., Sequence[str]] = lambda *words: words,
    ) -> None:
        self.home = home
        self.run_dir = home / "run"
        self.flags = home / "flags"
        self.temporary = home / "tmp"
        self.mark = uuid.uuid4().hex
        self.world_size = nproc
        self.events: list[Event] = []
        self.exit_code: int | None = None
        self._text = {"stdout": bytearray(), "stderr": bytearray()}
        self._partial = b""
        self._status_page: StatusPage | None = None
        for folder in (self.flags, self.temporary):
            folder.mkdir()
        os.mkfifo(home / "events")
        os.mkfifo(self.flags / "release")
        command = launcher or (
            *(sys.executable, "-m", "deadpool_run", "--no-config"),
            *("--nproc-per-node", str(nproc), "--spares", str(spares), "--run-dir", str(self.run_dir)),
        )
        if script == "train.py":
            args = ("--flags", str(self.flags), *args)
        self.command = [*within(*command, *options, str(SCRIPTS / script), *args)]
        # Read and write: without a writer, the FIFO would be at its end after its last writer closes.
        self._fifo = os.open(home / "events", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._gate = os.open(self.flags / "release", os.O_RDWR | os.O_CLOEXEC)
        self._agent = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(env),
        )
        self._pidfd = os.pidfd_open(self._agent.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pidfd, selectors.EVENT_READ, "agent")
        self._selector.register(self._fifo, selectors.EVENT_READ, "events")
        for name in self._text:
            pipe = getattr(self._agent, name)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, name)

    def _environment(self, extra: dict[str, str] | None) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("DEADPOOL_", "PET_"))}
        return {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(self.home / "inductor"),  # torch never removes it
            "KIT_EVENTS": str(self.home / "events"),
            MARK: self.mark,
            **(extra or {}),
        }

    # --- reading and waiting -------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The agent's."""
        return self._agent.pid

    @property
    def stdout(self) -> str:
        """The output so far."""
        return self._text["stdout"].decode(errors="replace")

    @property
    def stderr(self) -> str:
        """The output so far."""
        return self._text["stderr"].decode(errors="replace")

    @property
    def account(self) -> Account:
        """The output of the script so far."""
        return Account(self.events)

    def _read(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for something to read, and read it."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data == "agent":
                self._selector.unregister(self._pidfd)
                self.exit_code = self._agent.wait()
                continue
            data = os.read(key.fd, 1 << 16)
            if key.data == "events":
                *lines, self._partial = (self._partial + data).split(b"\n")
                self.events += map(json.loads, lines)
            elif data:
                self._text[key.data] += data
            else:
                self._selector.unregister(key.fileobj)

    def _read_rest(self) -> None:
        """Read the rest of the output after the agent has ended."""
        before = -1
        while before != (before := sum(map(len, self._text.values())) + len(self.events)):
            self._read(0)

    def wait_until(self, met: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
        """Return the first true value of `met`. It is called after each output of the job."""
        deadline = time.monotonic() + timeout_s
        while not (value := met()):
            if self.exit_code is not None:
                self._read_rest()
                if value := met():
                    return value
                raise AssertionError(f"the job ended ({self.exit_code}) before {what}\n{self.told()}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(f"no {what} within {timeout_s} s\n{self.stacks()}\n{self.told()}")
            self._read(left)
        return value

    def stacks(self) -> str:
        """Return the stacks of all workers, if the script prints them on SIGUSR2."""
        seen = len(self.stderr)
        workers = {e["pid"] for e in self.account.of("start")} & marked(self.mark).keys()
        for pid in workers:
            os.kill(pid, signal.SIGUSR2)
        deadline = time.monotonic() + 5
        while self.stderr.count(STACKS_END, seen) < len(workers) and time.monotonic() < deadline:
            self._read(deadline - time.monotonic())
        return self.stderr[seen:]

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s` for output and read it. Return whether the job has ended."""
        self._read(timeout_s)
        if self.exit_code is not None:
            self._read_rest()
        return self.exit_code is not None

    def wait_event(self, kind: str, *, nth: int = 1, timeout_s: float = START_TIMEOUT_S, **fields: object) -> Event:
        """Wait for the nth event of this kind with these fields, and return it."""
        what = f"event {nth} of {kind} {fields}"
        return self.wait_until(lambda: self.account.of(kind, **fields)[nth - 1 : nth], what, timeout_s)[0]

    def wait_state(self, rank: int, version: int, *, pid_not: Sequence[int] = ()) -> Event:
        """Return the rank's first state at this version or later, from a process other than these."""

        def met() -> list[Event]:
            found = self.account.of("state", rank=rank)
            return [e for e in found if e["version"] >= version and e["pid"] not in pid_not][:1]

        return self.wait_until(met, f"rank {rank} at version {version}")[0]

    def wait_stderr(self, text: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the launcher has printed this text."""
        self.wait_until(lambda: text in self.stderr, f"{text!r} on stderr", timeout_s)

    def wait_exit(self, timeout_s: float = 90.0) -> int:
        """Wait for the end of `deadpool-run`, and return its exit code."""
        self.wait_until(lambda: self.exit_code is not None, "exit of deadpool-run", timeout_s)
        self._read_rest()
        assert self.exit_code is not None
        return self.exit_code

    def told(self) -> str:
        """Return the last output and events, for the message of a failure."""
        parts = {
            "command": " ".join(self.command),
            "stderr": "\n".join(self.stderr.splitlines()[-LINES_SHOWN:]),
            "stdout": "\n".join(self.stdout.splitlines()[-LINES_SHOWN:]),
            "events": "\n".join(map(json.dumps, self.events[-16:])),
            "running": "\n".join(f"{pid} {command}" for pid, command in marked(self.mark).items()),
        }
        return "\n".join(f"--- {name}\n{text}" for name, text in parts.items())

    # --- acting --------------------------------------------------------------------------------------------------

    def pid_of(self, rank: int) -> int:
        """Return the process that holds the rank, according to the script's events."""
        return self.account.pids(rank)[-1]

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> int:
        """Kill the rank's process from outside; return its pid."""
        pid = self.pid_of(rank)
        os.kill(pid, how)
        return pid

    def signal_agent(self, number: signal.Signals) -> None:
        """Send a signal to `deadpool-run` itself."""
        os.kill(self.pid, number)

    def release(self) -> None:
        """Let the rank continue that waits because of `--hold`."""
        os.write(self._gate, b".")

    def command_line(self, *words: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a `deadpool-run` command on this run's directory."""
        command = [sys.executable, "-m", "deadpool_run", *words, "--run-dir", str(self.run_dir)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=self._environment(None)
        )

    def status(self) -> dict[str, Any]:
        """Return the output of `status --json`."""
        result = self.command_line("status", "--json")
        assert result.stdout, f"status printed nothing (rc {result.returncode}): {result.stderr}"
        return json.loads(result.stdout)

    def wait_status(self, met: Callable[[dict[str, Any]], Any], what: str, timeout_s: float = 30.0) -> Any:
        """Return the first true value of `met`, called with each status that `status --watch --json` prints."""
        words = ("status", "--watch", "--json", "--run-dir", str(self.run_dir))
        deadline, text = time.monotonic() + timeout_s, b""
        with subprocess.Popen(
            [sys.executable, "-m", "deadpool_run", *words], stdout=subprocess.PIPE, env=self._environment(None)
        ) as viewer:
            assert viewer.stdout is not None
            try:
                while select.select([viewer.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    *lines, text = (text + (data := os.read(viewer.stdout.fileno(), 1 << 16))).split(b"\n")
                    if found := next(filter(None, (met(json.loads(line)) for line in lines)), None):
                        return found
                    assert data, f"status ended before {what}\n{self.told()}"
            finally:
                viewer.kill()
        raise AssertionError(f"no {what} within {timeout_s} s\n{self.told()}")

    def kill_rank(self, rank: int, *words: str) -> subprocess.CompletedProcess[str]:
        """Inject a fault as a user would."""
        return self.command_line("kill-rank", str(rank), "--yes", *words)

    def journal(self) -> list[dict[str, Any]]:
        """Return the decisions of the coordinator's journal."""
        _leader, *lines = (self.run_dir / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def effects(self) -> list[dict[str, Any]]:
        """Return all orders of the coordinator, in order."""
        return [effect for decision in self.journal() for effect in decision["effects"]]

    def incidents(self) -> list[dict[str, Any]]:
        """Return every repair that the coordinator reported."""
        return [effect["incident"] for effect in self.effects() if effect["type"] == "ReportIncident"]

    @cached_property
    def status_page(self) -> StatusPage:
        """The job's status page, mapped through the agent's descriptor."""
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            if "deadpool-status_page" in str(entry.readlink()):
                fd = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
                try:
                    self._status_page = StatusPage(fd, self.world_size)
                finally:
                    os.close(fd)
                return self._status_page
        raise AssertionError(f"the agent has no status page\n{self.told()}")

    def look_until(self, seen: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        """Check without a pause until `seen` is true: for memory or a process's state, which cannot be waited for."""
        deadline = time.monotonic() + timeout_s
        while not seen():
            os.sched_yield()
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s\n{self.told()}"

    def kill_when(self, rank: int, seen: Callable[[RankEntry], bool], what: str) -> int:
        """Kill the rank's process as soon as `seen` is true of its rank entry. Return the pid."""
        rank_entry, pid = self.status_page.rank_entries[rank], self.pid_of(rank)
        self.look_until(lambda: seen(rank_entry), f"{what} of rank {rank}")
        os.kill(pid, signal.SIGKILL)
        return pid

    @contextmanager
    def store_stopped(self) -> Iterator[None]:
        """Stop the store for a while: members that attach stay in that phase, because they meet at the store."""
        (store,) = (pid for pid in marked(self.mark) if "deadpool-store" in thread_names(pid))
        os.kill(store, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(store, signal.SIGCONT)

    # --- what is promised ----------------------------------------------------------------------------------------

    def check_repaired(self, reference: States, lost: Sequence[int]) -> None:
        """Wait for the end. Assert every promise for a job that lost the processes of these ranks and no others."""
        assert self.wait_exit() == 0, self.told()
        self.account.check_same_as(reference)
        self.account.check_ranks(lost, self.world_size)
        self.account.check_steps_repeated(self.effects())
        self.check_nothing_left()

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the job if it runs, and close all descriptors."""
        if self.exit_code is None:
            self._agent.kill()
            self._agent.wait()
        left = wait_gone(self.mark, 10)
        kill_marked(self.mark)
        if self._status_page is not None:
            self._status_page.close()
        self._selector.close()
        for fd in (self._pidfd, self._fifo, self._gate):
            os.close(fd)
        for pipe in (self._agent.stdout, self._agent.stderr):
            assert pipe is not None
            pipe.close()
        assert not left, f"processes that outlived the job by 10 s: {left}"

    def check_nothing_left(self) -> None:
        """Assert that the job has left only the files that the user reads. Call it right after the job's normal end."""
        assert self.exit_code is not None
        left = marked(self.mark)
        assert not left, f"processes that outlived the job: {left}"
        sockets = [path for path in self.run_dir.rglob("*") if path.is_socket() or path.is_fifo()]
        assert not sockets, f"sockets that outlived the job: {sockets}"
        temporary = list(self.temporary.iterdir())
        assert not temporary, f"temporary files that outlived the job: {temporary}"
