"""An agent's part that closes a store before its fork server can make a process for it, and waits for all that was made."""

import asyncio
import os
import uuid

from deadpool_run.agent.processes import children
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.forkserver_main import MARK
from deadpool_run.agent.processes.forkserver_process import ForkServerSpec
from deadpool_run.agent.processes.store import Store


async def main():
    lost = []
    forkserver = ForkServer(ForkServerSpec((), {**os.environ, MARK: uuid.uuid4().hex}), lost.append)
    closed, other = (
        Store(forkserver, lost.append, "127.0.0.1", print),
        Store(forkserver, lost.append, "127.0.0.1", print),
    )
    closed.close()
    await forkserver.settled(30)
    made = closed.process
    other.close()
    forkserver.close()
    await asyncio.gather(other.process.gone.wait(), forkserver._process.gone.wait())
    print("lost", lost, "made", made)


if __name__ == "__main__":
    children.become_subreaper()
    asyncio.run(main())
