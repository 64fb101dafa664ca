"""An agent's part that has four workers made at once, and looks whether one's end is seen while the others live."""

import asyncio
import os
import signal
import socket
import uuid
from types import SimpleNamespace

from deadpool_run.agent.processes import children
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.forkserver_main import MARK
from deadpool_run.agent.processes.forkserver_process import ForkServerSpec

WORKERS = 4
BOUND_S = 30


async def main():
    loop = asyncio.get_running_loop()
    forkserver = ForkServer(ForkServerSpec((), {**os.environ, MARK: uuid.uuid4().hex}), print)
    births, controls = [], []

    def order():
        born = loop.create_future()
        births.append(born)

        def make_fds():
            ours, theirs = socket.socketpair()
            ours.settimeout(BOUND_S)
            controls.append(ours)
            return [theirs.detach()]

        forkserver.fork(
            SimpleNamespace(
                kind="worker", make_fds=make_fds, forked=born.set_result, exited=lambda _: None, recalled=False
            )
        )

    for _ in range(WORKERS):
        order()
    workers = await asyncio.wait_for(asyncio.gather(*births), BOUND_S)
    ready = [control.recv(1 << 16) for control in controls]
    for worker, control in zip(workers, controls, strict=True):
        worker.signal(signal.SIGKILL)
        print("ended", control.recv(1))
        control.close()
        await worker.gone.wait()
    forkserver.close()
    await forkserver._process.gone.wait()
    print(len({worker.pid for worker in workers}), "said", len(set(ready)))


if __name__ == "__main__":
    children.become_subreaper()
    asyncio.run(main())
