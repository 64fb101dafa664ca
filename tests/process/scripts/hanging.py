"""`train.py`, whose faults can also be to loop for ever, and to be slow for a moment (`how=loop|nap`)."""

import os
import sys
import time
from pathlib import Path

import faults

NAP_S = 0.7
_end = faults.end


def end_or_hang(how):
    match how:
        case "loop":
            while True:
                pass
        case "nap":
            time.sleep(NAP_S)
        case _:
            _end(how)


if __name__ == "__main__":
    faults.end = end_or_hang
    sys.argv += ["--flags", str(Path(os.environ["KIT_EVENTS"]).parent / "flags")]
    import train

    train.main()
