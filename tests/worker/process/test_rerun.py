"""The process's state is put back between two runs of a script. Each test has its own process."""

import subprocess
import sys

PROGRAM = """
import importlib, os, random, signal, sys, warnings, logging
import numpy.random, torch
from torch import nn
from deadpool_run.worker.process.rerun import ProcessBaseline

optimizers = importlib.import_module("torch.optim.optimizer")
before = (dict(os.environ), list(sys.argv), list(sys.path), os.getcwd(), sys.stdout, sys.excepthook)
baseline = ProcessBaseline()
numbers = [random.random(), float(numpy.random.random()), float(torch.rand(1))]

sys.path.insert(0, sys.argv[1])
os.chdir(sys.argv[1])
import helper
helper.COUNT += 1
os.environ["SCRIPT"] = "1"
del os.environ["HOME"]
sys.argv.append("more")
sys.stdout = sys.stderr
sys.excepthook = print
signal.signal(signal.SIGUSR1, lambda *_: None)
warnings.filterwarnings("ignore")
logging.basicConfig(level=logging.DEBUG)
import wave
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
nn.modules.module.register_module_forward_hook(lambda *_: None)
optimizers.register_optimizer_step_post_hook(lambda *_: None)

baseline.restore()
assert (dict(os.environ), list(sys.argv), list(sys.path), os.getcwd(), sys.stdout, sys.excepthook) == before
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
assert "helper" not in sys.modules, "its globals are of the last run"
assert "wave" in sys.modules, "a library stays"
assert not logging.root.handlers
assert torch.get_default_dtype() is torch.float32
assert torch.is_grad_enabled()
assert not nn.modules.module._global_forward_hooks
assert not optimizers._global_optimizer_post_hooks
assert numbers == [random.random(), float(numpy.random.random()), float(torch.rand(1))]
print("as it was")
"""


def test_the_process_is_as_it_was(tmp_path):
    (tmp_path / "helper.py").write_text("COUNT = 0\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "as it was\n", done.stderr


UNWINDING = """
import threading, time
from deadpool_run.errors import RunLeft
from deadpool_run.worker.process.unwind import AsyncRaise

unwinding = AsyncRaise()
kept = 0

def script():
    global kept
    while True:
        try:
            started.set()
            while True:
                pass
        except Exception:
            raise AssertionError("a handler for exceptions kept it")
        except BaseException:
            kept += 1
            if kept > 1:
                raise

for _ in range(2):
    kept, started = 0, threading.Event()
    threading.Thread(target=lambda: started.wait() and unwinding.begin()).start()
    try:
        script()
    except RunLeft:
        pass
    unwinding.end()
    deadline = time.monotonic() + 0.7  # longer than it takes to raise again
    while time.monotonic() < deadline:
        pass
print("left twice")
"""


def test_the_main_thread_is_made_to_leave_and_then_left_alone():
    done = subprocess.run([sys.executable, "-c", UNWINDING], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "left twice\n", done.stderr
