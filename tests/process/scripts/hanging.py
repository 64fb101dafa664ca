"""`train.py`, whose faults can also be to loop for ever, to hold the GIL in a C call for ever, to be slow, and to be very slow.

`how=loop|gil|nap|doze`
"""

import ctypes
import os
import sys
import time
from pathlib import Path

import faults

NAP_S, DOZE_S = 0.7, 6.0
_end = faults.end


def end_or_hang(how):
    match how:
        case "loop":
            while True:
                pass
        case "gil":
            mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
            lock(mutex)
            lock(mutex)  # no signal ends this wait, and no other thread of Python runs again
        case "nap":
            time.sleep(NAP_S)
        case "doze":
            time.sleep(DOZE_S)
        case _:
            _end(how)


if __name__ == "__main__":
    faults.end = end_or_hang
    faults.prepare()
    sys.argv += ["--flags", str(Path(os.environ["KIT_EVENTS"]).parent / "flags")]
    import train

    train.main()
