"""An agent's part that lets go of a store, and ends all that it has adopted while the store's process still dies."""

import asyncio
import os
import uuid

from deadpool_run.agent.processes import children
from deadpool_run.agent.processes.forkserver import Nursery
from deadpool_run.agent.processes.forkserver_main import MARK
from deadpool_run.agent.processes.forkserver_process import NurserySpec
from deadpool_run.agent.processes.store import Store


async def main():
    bugs = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
    nursery = Nursery(NurserySpec((), {**os.environ, MARK: uuid.uuid4().hex}), print)
    store = Store(nursery, print)
    await nursery.settled(30)
    gone = store.process.gone
    store.close()
    del store
    nursery.kill_strangers(30)
    await gone.wait()
    nursery.close()
    await nursery.process.gone.wait()
    print("left", nursery.children(), "bugs", bugs)


if __name__ == "__main__":
    children.become_subreaper()
    asyncio.run(main())
