"""An agent's part that closes a store before its nursery can make a process for it, and waits for all that was made."""

import asyncio
import os
import uuid

from deadpool_run.agent.processes import children
from deadpool_run.agent.processes.forkserver import Nursery
from deadpool_run.agent.processes.forkserver_main import MARK
from deadpool_run.agent.processes.forkserver_process import NurserySpec
from deadpool_run.agent.processes.store import Store


async def main():
    lost = []
    nursery = Nursery(NurserySpec((), {**os.environ, MARK: uuid.uuid4().hex}), lost.append)
    closed, other = Store(nursery, lost.append), Store(nursery, lost.append)
    closed.close()
    await nursery.settled(30)
    made = closed.process
    other.close()
    nursery.close()
    await asyncio.gather(other.process.gone.wait(), nursery.process.gone.wait())
    print("lost", lost, "made", made)


if __name__ == "__main__":
    children.become_subreaper()
    asyncio.run(main())
