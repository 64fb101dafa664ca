"""Processes that claim terms at the same time, and the rules that their reports must obey."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("claimer.py")
WAIT_S = 60.0


class Claimers:
    """Starts claimers of one run and checks each report against all others. As a context manager, it ends them all."""

    def __init__(self, text, run_id, environment=None, account=()):
        self._args = (text, run_id)
        self._account = account
        self._environment = {**os.environ, **(environment or {})}
        self._selector = selectors.DefaultSelector()
        self._rest = {}
        self._processes = {}
        self.leaders = {}
        """The node of each term that any claimer won or saw."""
        self.wins = []
        self._largest = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.ExitStack() as stack:
            stack.callback(self._selector.close)
            for name in list(self._processes):
                stack.callback(self.kill, name)

    def start(self, *names):
        """Start claimers, and wait until they are ready."""
        for name in names:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *self._args, name, *self._account],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            os.set_blocking(process.stdout.fileno(), False)
            self._processes[name], self._rest[name] = process, b""
            self._selector.register(process.stdout, selectors.EVENT_READ, name)
        waiting = set(names)
        while waiting:
            name, report = self.report()
            waiting -= {name} if "ready" in report else set()

    def order(self, line, *names):
        """Send a line to these claimers, or to all of them."""
        for name in names or list(self._processes):
            self._processes[name].stdin.write(line.encode() + b"\n")
            self._processes[name].stdin.flush()

    def kill(self, name):
        """End a claimer with SIGKILL. Reports that it had sent still count."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(WAIT_S)
        self._selector.unregister(process.stdout)
        os.set_blocking(process.stdout.fileno(), True)
        whole, _, _ = (self._rest[name] + process.stdout.read()).rpartition(b"\n")
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # it did not read an order
            process.stdin.close()
        for line in filter(None, whole.split(b"\n")):
            self._check(name, json.loads(line))

    def report(self):
        """Return the next report and the claimer's name."""
        while True:
            for name, rest in self._rest.items():
                if b"\n" in rest and name in self._processes:
                    line, _, self._rest[name] = rest.partition(b"\n")
                    report = json.loads(line)
                    self._check(name, report)
                    return name, report
            ready = self._selector.select(WAIT_S)
            assert ready, "no claimer reports anything"
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                assert data, f"{key.data} ended on its own: see its traceback above"
                self._rest[key.data] += data

    def claim(self, term):
        """Make all claim a term at once. Return the names of the winners."""
        self.order(str(term))
        answers = dict(self.report() for _ in self._processes)
        assert all(report["term"] == term for report in answers.values())
        return [name for name, report in answers.items() if report["won"]]

    def race(self, count):
        """Make all claim the next term, `count` times, and wait until they have done so."""
        self.order(f"race {count}")
        racing = set(self._processes)
        while racing:
            name, report = self.report()
            racing -= {name} if "done" in report else set()

    def _check(self, name, report):
        seen, won = report.get("saw"), report.get("won", False)
        if seen is not None:
            term, node = seen["term"], seen["node"]
            assert term >= self._largest.get(name, -1), f"{name} saw the terms go back"
        elif won:
            term, node = report["term"], name
            assert (term, name) not in self.wins
            self.wins.append((term, name))
        else:
            return
        self._largest[name] = term
        assert self.leaders.setdefault(term, node) == node, f"term {term} has two leaders"
