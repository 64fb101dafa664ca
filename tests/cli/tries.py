"""Answers to wrong command lines, as a transcript for docs/command-line.md. Run this module to print it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from deadpool_run.cli import app

WAIT_S = 120
FILES = {
    "train.py": "print('trained')\n",
    "wrong.py": "def step(:\n",
    "sleep.sh": "echo up; exec sleep 600\n",
    "waits.py": "import os\nimport signal\n\nif os.environ['RANK'] == '1':\n    print('up', flush=True)\nsignal.pause()\n",
    "site.yaml": "spare: 1\n",
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
    "--nnodes 2 train.py",
    "--nnodes 2:4 train.py",
    "--nnodes 2 --spares 2 --rdzv-endpoint localhost:29400 train.py",
    "status",
    "kill-rank 1",
    "status --run-id nosuch",
)
"""Lines that start nothing."""


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
        """Have a line run, whose script says that it is up; yield its process."""
        with subprocess.Popen(
            self.command(line), cwd=self.home / "work", env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            said = ""
            while not said.endswith("up\n"):
                said += process.stdout.readline()
                assert process.poll() is None, said
            try:
                yield process
            finally:
                process.terminate()
                process.stdout.read()

    @staticmethod
    def command(line):
        return [sys.executable, "-m", "deadpool_run", *line.split()]

    def keep(self, prompt, code, said, line=None):
        line, prompt = (prompt, "") if line is None else (line, prompt)
        text = "\n".join(each.rstrip() for each in said.splitlines())
        for pattern, by in (
            (re.escape(str(self.home / "work")), "/home/me/work"),
            (re.escape(str(self.home)), "/home/me"),
            (r"(/logs/[\w-]+_)\w{8}", r"\1ab12cd34"),
            (r"\bafter [0-9hms]+", "after 3s"),
            (r"\bended [0-9hms]+ ago", "ended 5s ago"),
            (r"\d{8}-\d{6}-\w{4}", "20260301-091500-7f3a"),
            (r"worker [0-9]+\b", "worker 0"),
            (r"rank [01] \(worker", "rank 0 (worker"),
        ):
            text = re.sub(pattern, by, text)
        self.shown.append(f"$ {prompt}deadpool-run {line}".rstrip() + f"\n{text}\n(exit code {code})\n")


def transcript(home):
    """Return the transcript."""
    tries = Tries(home)
    for line in REFUSED:
        tries.refused(line)
    tries.started("--no-python /bin/true --spares 1")
    tries.started("--no-python /bin/true", DEADPOOL_SPAERS="1")
    tries.started("--spares 1 --run-id night --no-python /bin/true")
    tries.started("--run-id night --no-python /bin/false")
    tries.refused("status --run-id night")
    tries.started("--nproc-per-node 2 wrong.py")
    with tries.live("--run-id first --nproc-per-node 2 waits.py") as first:
        tries.refused("kill-rank 7")
        with tries.live("--run-id second --no-python /bin/sh sleep.sh"):
            tries.refused("status")
        first.send_signal(signal.SIGINT)
        said = first.stdout.read()
        tries.keep("--run-id first --nproc-per-node 2 waits.py    (Ctrl-C)", first.wait(WAIT_S), said)
    return "\n".join(tries.shown)


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    try:
        sys.stdout.write(transcript(folder))
    finally:
        shutil.rmtree(folder)
