"""Ranks that never end by themselves, each with a child in its process group and one that left it for its own session."""

import signal
import subprocess
import sys

from telling import tell

PAUSE = [sys.executable, "-S", "-c", "import signal; signal.pause()"]

near = subprocess.Popen(PAUSE, env={})  # found by its group alone; the other by its environment alone
far = subprocess.Popen(PAUSE, start_new_session=True)
tell("start", near=near.pid, far=far.pid)
while True:
    signal.pause()
