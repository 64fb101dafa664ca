"""Answers to wrong command lines and scripts, as transcripts for docs/command-line.md.

Run this module to print them, or only the part that is named: `lines`, `runs` or `scripts`.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from deadpool_run.cli import app

WAIT_S = 120
TRAINS = """\
import torch
import torch.distributed as dist
import deadpool_run as deadpool

job = deadpool.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
job.protect(model=model, optimizer=optimizer)
for step in job.steps(100000):
    with step:
        model(torch.ones(1, 2)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
"""
"""A script that is right, and from which those that are not are made."""
INIT, PROTECT, WITH = (
    "job = deadpool.init()\n",
    "job.protect(model=model, optimizer=optimizer)\n",
    "    with step:\n",
)
UP = "    if step.index == 5 and job.rank == 0:\n        print('up', flush=True)\n"
SHORT = TRAINS.replace("100000", "100")
"""Ends by itself."""
FILES = {
    "train.py": "print('trained')\n",
    "wrong.py": "def step(:\n",
    "sleep.sh": "echo up; exec sleep 600\n",
    "waits.py": "import os\nimport signal\n\nif os.environ['RANK'] == '1':\n    print('up', flush=True)\nsignal.pause()\n",
    "site.yaml": "spare: 1\n",
    "broken.yaml": "spares: [1\n",
    "trains.py": TRAINS + UP,
    "no_init.py": "import torch\n\nprint(torch.ones(2).sum())\n",
    "no_module.py": "import nosuch\n",
    "raises.py": TRAINS.replace(PROTECT, "raise ValueError('the data folder is empty')\n"),
    "late_init.py": TRAINS.replace(INIT, f"dist.init_process_group('gloo')\n{INIT}"),
    "no_protect.py": TRAINS.replace(PROTECT, ""),
    "half_protected.py": TRAINS.replace(", optimizer=optimizer", ""),
    "own_loop.py": SHORT.replace("job.steps(100)", "range(100)").replace(WITH, "    if True:\n"),
    "no_with.py": SHORT.replace(WITH, "    if True:\n"),
}
REFUSED = (
    "",
    "--nprocs 2 train.py",
    "--nproc-per-nodes 2 train.py",
    "--spare 1 train.py",
    "--bogus train.py",
    "--spares one train.py",
    "--spares -1 train.py",
    "--nproc-per-node 0 train.py",
    "--nproc-per-node gpu train.py",
    "--hang-timeout 10x train.py",
    "--config site.yaml train.py",
    "--config broken.yaml train.py",
    "trian.py",
    "python train.py",
    "/bin/sh train.sh",
    ".",
    "-m nosuch.train",
    "-m train.py",
    "statsu",
    "list",
    "nonsense",
    "--run-dir /proc/run train.py",
    "--run-dir site.yaml/run train.py",
    "--nnodes 2 train.py",
    "--nnodes 2:4 train.py",
    "--nnodes 2 --spares 2 --rdzv-endpoint localhost:29400 train.py",
    "status",
    "kill-rank 1",
    "status --run-id nosuch",
)
"""Lines that start nothing."""


@contextmanager
def hangup_as_usual():
    """Have processes that are started in here not ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class Tries:
    """Runs lines in a folder of its own, and keeps what came back."""

    def __init__(self, home):
        self.home = home
        self.shown = []
        (home / "work").mkdir()
        for name, text in FILES.items():
            (home / "work" / name).write_text(text)
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "KIT_MARK") if name in os.environ}
        ours = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
        with socket.create_server(("localhost", 0)) as free:
            self.port = free.getsockname()[1]
        self.environment = {**kept, **ours, "CUDA_VISIBLE_DEVICES": ""}

    def refused(self, line):
        """Run a line within this process."""
        before, folder, argv = dict(os.environ), Path.cwd(), sys.argv
        with tempfile.TemporaryFile() as file:
            kept = os.dup(2)
            os.dup2(file.fileno(), 2)
            os.environ.clear()
            os.environ.update(self.environment)
            os.chdir(self.home / "work")
            sys.argv = ["deadpool-run", *line.split()]
            try:
                app.main()
            except SystemExit as leaving:
                code = leaving.code
            finally:
                os.dup2(kept, 2)
                os.close(kept)
                os.environ.clear()
                os.environ.update(before)
                os.chdir(folder)
                sys.argv = argv
            file.seek(0)
            self.keep(line, code, file.read().decode())

    def started(self, line, **variables):
        """Run a line to its end."""
        done = subprocess.run(
            self.command(line), cwd=self.home / "work", env=self.environment | variables, check=False, timeout=WAIT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.keep("".join(f"{name}={value} " for name, value in variables.items()), done.returncode, done.stdout, line)

    @contextmanager
    def live(self, line):
        """Have a line run, whose script says that it is up; yield its process. It handles SIGHUP also if pytest runs under nohup."""
        with hangup_as_usual(), subprocess.Popen(
            self.command(line), cwd=self.home / "work", env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            self.read_to(process, "up\n")
            try:
                yield process
            finally:
                process.terminate()
                process.stdout.read()

    @staticmethod
    def read_to(process, end):
        """Read lines of a process until one has this end; return them."""
        said = ""
        while not said.endswith(end):
            line = process.stdout.readline()
            assert line, said
            said += line
        return said

    def ended(self, line, process, number, how, said=""):
        """End a live line with a signal, and keep what it says after `said`."""
        process.send_signal(number)
        said += process.stdout.read()
        self.keep(f"{line}    ({how})", process.wait(WAIT_S), said)

    @staticmethod
    def command(line):
        return [sys.executable, "-m", "deadpool_run", *line.split()]

    def keep(self, prompt, code, said, line=None):
        line, prompt = (prompt, "") if line is None else (line, prompt)
        text = "".join(f"{each.rstrip()}\n" for each in said.splitlines())
        for pattern, by in (
            (re.escape(str(self.home / "work")), "/home/me/work"),
            (re.escape(str(self.home)), "/home/me"),
            (r"(/logs/[\w-]+_)\w{8}", r"\1ab12cd34"),
            (r"\bafter [0-9hms]+", "after 3s"),
            (r"\bended [0-9hms]+ ago", "ended 5s ago"),
            (r"\d{8}-\d{6}-\w{4}", "20260301-091500-7f3a"),
            (r"\+00:00", "Z"),
            (r"\d{4}(-\d\d){2}T[0-9:.]+Z", "2026-03-01T09:15:00Z"),
            (r"\bworker [0-9]+", "worker N"),
            (r"\brank [01] \(worker N\) raised", "rank 0 (worker N) raised"),
            (r"\b(pid|process) [0-9]+", r"\1 4711"),
            (r"\bin [0-9.]+ s\b", "in 0.25 s"),
            (r"\b[0-9.]+ s lost\b", "0.3 s lost"),
            (r"\bgoodput [0-9.]+", "goodput 96.0"),
            (r"\bprotected since step [0-9]+", "protected since step 2"),
            (r"\bresumed at step [0-9]+", "resumed at step 12"),
            (r"\b[0-9]+ steps, 1 repair\b", "60 steps, 1 repair"),
            (r"\b[0-9]+ steps? repeated", "1 step repeated"),
            (r"\bFound by rank [01]", "Found by rank 0"),
            (rf"\b{self.port}\b", "29400"),
        ):
            line, text = (re.sub(pattern, by, each) for each in (line, text))
        self.shown.append(f"$ {prompt}deadpool-run {line}".rstrip() + f"\n{text}(exit code {code})\n")


def lines(tries):
    """Lines that start nothing."""
    for line in REFUSED:
        tries.refused(line)


def runs(tries):
    """Runs of programs that do not train: their messages, and how they end."""
    tries.started("run --no-python /bin/true")
    tries.started("--no-python /bin/true --spares 1")
    tries.started("--no-python /bin/true", DEADPOOL_SPAERS="1")
    tries.started("--spares 1 --run-id night --no-python /bin/true")
    tries.started("--run-id night --no-python /bin/false")
    tries.refused("status --run-id night")
    tries.started(f"--nnodes 2 --rdzv-endpoint localhost:{tries.port} --join-timeout 1 --no-python /bin/true")
    sleeps, waits = "--run-id second --no-python /bin/sh sleep.sh", "--run-id first --nproc-per-node 2 waits.py"
    with tries.live(waits) as first:
        for line in ("kill-rank 7", "kill-rank x", "kill-rank 1 --how nuke", f"{waits}"):
            tries.refused(line)
        with tries.live(sleeps) as second:
            tries.refused("status")
            tries.ended(sleeps, second, signal.SIGTERM, "SIGTERM")
        tries.ended(waits, first, signal.SIGINT, "Ctrl-C")
    with tries.live(sleeps) as closed:
        tries.ended(sleeps, closed, signal.SIGHUP, "its terminal is closed")
    with tries.live(sleeps) as killed:
        tries.ended(sleeps, killed, signal.SIGKILL, "kill -9 of the launcher")
    tries.refused("status --run-id second")


def scripts(tries):
    """Scripts that are wrong as their names say, and one that is right."""
    tries.started("--nproc-per-node 2 wrong.py")
    tries.started("--spares 1 no_init.py")
    tries.started("no_module.py")
    tries.started("raises.py")
    tries.started("--nproc-per-node 2 late_init.py")
    tries.started("no_protect.py")
    tries.started("half_protected.py")
    tries.started("--redirects 3 own_loop.py")
    tries.started("no_with.py")
    trains = "--run-id alone --nproc-per-node 2 trains.py"
    with tries.live(trains) as job:
        tries.started("kill-rank 1 --yes")
        tries.ended(trains, job, signal.SIGTERM, "SIGTERM", tries.read_to(job, "repeated\n"))


PARTS = {part.__name__: part for part in (lines, runs, scripts)}


def transcript(part, home):
    """Return the transcript of a part."""
    tries = Tries(home)
    PARTS[part](tries)
    return "\n".join(tries.shown)


if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        folder = Path(tempfile.mkdtemp())
        try:
            sys.stdout.write(transcript(part, folder))
        finally:
            shutil.rmtree(folder)
