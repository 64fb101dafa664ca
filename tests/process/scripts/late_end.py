"""An agent's part that lets go of a store, and ends all that it has adopted while the store's process still dies."""

import asyncio
import os
import uuid

from deadpool_run.agent.processes import children
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.forkserver_main import MARK
from deadpool_run.agent.processes.forkserver_process import ForkServerSpec
from deadpool_run.agent.processes.store import Store


async def main():
    bugs = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
    forkserver = ForkServer(ForkServerSpec((), {**os.environ, MARK: uuid.uuid4().hex}), print)
    store = Store(forkserver, print, "127.0.0.1", print)
    await forkserver.settled(30)
    gone = store.process.gone
    store.close()
    del store
    forkserver.kill_strangers(30)
    await gone.wait()
    forkserver.close()
    await forkserver._process.gone.wait()
    print("left", forkserver.children(), "bugs", bugs)


if __name__ == "__main__":
    children.become_subreaper()
    asyncio.run(main())
