"""torchrun, imported once and forked for each command line: the same code, without three seconds of imports each time.

Started as a program it reads a JSON object per line (`argv`, `env`, `cwd`, `stdout`, `stderr`, `module`) and answers with the
pid of the process that runs it; `{"wait": pid}` is answered with its exit code.
"""

import importlib
import json
import os
import sys
from pathlib import Path


def become(order):
    """Be `torchrun ARGV`, with the streams and the environment of the order. Returns its exit code."""
    places = ((os.devnull, "r"), (order["stdout"], "a"), (order["stderr"], "a"))
    streams = [Path(path).open(mode) for path, mode in places]  # noqa: SIM115 - for good
    for fd, stream in enumerate(streams):
        os.dup2(stream.fileno(), fd)
    sys.stdin, sys.stdout, sys.stderr = streams
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = ["torchrun", *order["argv"]]
    try:
        sys.modules[order["module"]].main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def serve():
    for module in ("torch.distributed.run", "torch.distributed.launch"):
        importlib.import_module(module)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            code = become(order)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


if __name__ == "__main__":
    serve()
