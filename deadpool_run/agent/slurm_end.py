"""The end of a Slurm job whose batch host is dead: nobody but an agent is left to end it.

When the first node dies, the batch script and `srun` die with it. The tasks of the other nodes run on to their end, but
after it the job would hold its nodes until its time limit (measured with Slurm 22.05, where Slurm has noticed the dead
node as well as where it has not).
"""

import asyncio
from collections.abc import Callable, Collection

from deadpool_run.agent.discovery.slurm import Discovery

_CONNECT_TIMEOUT_S = 3.0
_CANCEL_TIMEOUT_S = 20.0


async def end_job_if_nobody_waits(place: Discovery | None, living: Collection[str], say: Callable[[str], None]) -> bool:
    """Cancel our batch job if the `srun` that started us is gone; return whether that was done.

    For the last agent of a run, after everything else is over (the SIGTERM that follows is for itself too); `living` are the names of the nodes whose agents were
    there to the end. While `srun` lives (it waits for us) nothing is done: it returns by itself, and the batch script
    goes on. It cannot be gone while its machine lives, for its death ends the step; so it is asked (which makes it
    complain of an empty message) only if the agent beside it was lost.
    """
    if place is None or place.step is None or not place.batch or not place.step.starter:
        return False
    if place.nodes[0] in living or await _listens(place.step.starter):
        return False
    say(
        f"srun at {place.step.starter} is gone, and with it the batch script: ending Slurm job {place.job_id} with scancel"
    )
    why = await _cancel(place.job_id)
    if why:
        say(f"scancel: {why}; job {place.job_id} holds its nodes until somebody runs `scancel {place.job_id}`")
    return not why


async def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _cancel(job_id: str) -> str:
    """Run scancel; return why that failed, nothing if it did not."""
    try:
        process = await asyncio.create_subprocess_exec(
            *("scancel", job_id),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return error.strerror or "cannot be run"
    try:
        _, told = await asyncio.wait_for(process.communicate(), _CANCEL_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"no answer within {_CANCEL_TIMEOUT_S:.0f} s"
    return told.decode(errors="replace").strip() if process.returncode else ""
