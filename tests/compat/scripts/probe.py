"""A worker that writes down what it was given, and then ends as its arguments say. Imports nothing of torch's.

`PROBE_DIR` has two FIFOs: into `events` goes a byte when it is up, and from `go` comes one when all ranks are.
Orders are arguments: `1=7` (rank 1 exits with code 7), `all=hold`, `0once=SIGKILL` (in its first life), `trap=SIGTERM`.
"""

import json
import os
import resource
import select
import signal
import sys
from pathlib import Path

WAIT_S = 100.0
HOME = Path(os.environ["PROBE_DIR"])


def where(fd):
    """Return what a descriptor is, where the test can know it: its path, or the kind of it."""
    path = str(Path(f"/proc/self/fd/{fd}").readlink())
    return path if path.startswith("/") else path.partition(":")[0]


def signals():
    lines = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {"blocked": lines["SigBlk"], "ignored": lines["SigIgn"]}


def given():
    return {
        "argv": sys.argv,
        "cwd": str(Path.cwd()),
        "env": dict(os.environ),
        "executable": sys.executable,
        "file": __file__,
        "flags": list(sys.flags),
        "main": __name__,
        "path": sys.path[0],
        "leads its session": os.getsid(0) == os.getpid(),
        "streams": [where(fd) for fd in range(3)],
        "signals": signals(),
        "umask": os.umask(0o022),
        "torch is imported": "torch" in sys.modules,
    }


def meet():
    """Tell that this rank is up, and wait until all are."""
    events = os.open(HOME / "events", os.O_WRONLY)
    os.write(events, b".")
    os.close(events)
    go = os.open(HOME / "go", os.O_RDWR)
    assert select.select([go], [], [], WAIT_S)[0], "nobody said go"
    os.read(go, 1)
    os.close(go)


def note(what):
    (HOME / f"note-{os.environ['RANK']}-{what}").touch()


def trap(name):
    number = getattr(signal, name)
    signal.signal(number, lambda *_: (note(name), sys.exit(0)))


def fail(how):
    match how:
        case "raise":
            raise ValueError("probe: boom")
        case "unended" | "unflushed":
            sys.stdout.write(f"probe: {how}")
            if how == "unended":
                sys.stdout.flush()
            os._exit(0)
        case "hold":  # until it is ended
            select.select([], [], [], WAIT_S)
        case "deaf":  # until it is killed
            signal.alarm(int(WAIT_S))
            while True:
                signal.pause()
        case "text":
            sys.exit("probe: a text")
        case _ if how.startswith("SIG"):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), getattr(signal, how))
        case _:
            sys.exit(int(how))


def main():
    rank = os.environ.get("RANK", "none")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "none")
    orders = [word.split("=") for word in sys.argv[1:] if word.count("=") == 1 and not word.startswith("-")]
    lived = HOME / f"lived-{rank}"  # counts of restarts are not the same under every launcher
    mine = {rank, "all"} | (set() if lived.exists() else {f"{rank}once", "allonce"})
    lived.touch()
    (HOME / f"given-{rank}-{attempt}.json").write_text(json.dumps(given()))
    for key, what in orders:
        if key == "trap":
            trap(what)
        if key in mine and what == "deaf":
            signal.signal(signal.SIGTERM, lambda *_: note("heard"))
    # One write each: of what `print` writes in two, torchrun's tail may see the one without the other.
    sys.stdout.write(f"probe: out of {rank}, apples\n")
    sys.stdout.write(f"probe: out of {rank}, pears\n")
    sys.stderr.write(f"probe: err of {rank}, apples\n")
    meet()
    for key, how in orders:
        if key in mine:
            fail(how)


if "record" in sys.argv:
    from torch.distributed.elastic.multiprocessing.errors import record

    main = record(main)

main()
