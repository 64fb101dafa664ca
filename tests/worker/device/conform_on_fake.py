"""One rank of a behaviour of `doctor --gpu`, on the fake device. Run by test_doctor_conformance.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kit.device import fake_device

from deadpool_run.worker.check.conformance import main

if __name__ == "__main__":
    fake_device.use()
    main(sys.argv[1], *map(int, sys.argv[2:]))
