"""A script that does not end when it is asked to."""

import signal

from telling import tell

signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("start")
while True:
    signal.pause()
