"""The end of a Slurm job whose batch host is dead: nobody but an agent is left to end it.

When the first node dies, the batch script and `srun` die with it. The tasks of the other nodes run on to their end, but
after it the job would hold its nodes until its time limit (measured with Slurm 22.05, where Slurm has noticed the dead
node as well as where it has not).
"""

import asyncio
import json
from collections.abc import Callable, Collection
from pathlib import Path

from deadpool_run.agent.cluster import leader_file
from deadpool_run.agent.records.run_record import RECORD_NAME
from deadpool_run.agent.slurm import hostlist
from deadpool_run.agent.slurm.discovery import Discovery
from deadpool_run.errors import UsageError

_CONNECT_TIMEOUT_S = 3.0
_ANSWER_TIMEOUT_S = 20.0


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


async def end_job_given_up(place: Discovery | None, base: Path, say: Callable[[str], None]) -> bool:
    """Cancel our batch job if nobody is left to train or to wait for it; return whether that was done.

    For an agent that gives up looking for the others, such as where too few are left to agree on who leads. It may be the
    one that is cut off, and must not end what others do: only the run's directory `base` tells, where whoever leads says so.
    """
    if place is None or place.step is None or not place.batch or not place.step.starter:
        return False
    leads = leader_file.read(base)
    name = "" if leads is None else leads.node.partition("~")[0]  # a node that came back has its number behind that
    if leads is None:
        why = f"others may go on with it, and {base}, which would tell, cannot be read here"
    elif name != place.nodes[0] and not _has_ended(Path(leads.run_dir)) and await _may_live(place, name):
        why = f"node {leads.node} may go on with it"
    else:
        return await end_job_if_nobody_waits(place, (), say)
    if not await _listens(place.step.starter):
        say(
            f"Slurm job {place.job_id} has lost its batch script, and is not ended: {why}; "
            f"if nobody does, run `scancel {place.job_id}`"
        )
    return False


def _has_ended(run_dir: Path) -> bool:
    """Return whether an agent has left its record complete."""
    try:
        record = json.loads((run_dir / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and bool(record.get("ended"))


async def _may_live(place: Discovery, name: str) -> bool:
    """Return whether Slurm counts the node to the job still: one that it has found dead it does not."""
    if name not in place.nodes:
        return True  # called otherwise by the user
    why, told = await _ask("squeue", "--noheader", f"--jobs={place.job_id}", "--format=%N")
    try:
        return bool(why) or name in hostlist.expand(told.strip())
    except UsageError:
        return True


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
    why, _ = await _ask("scancel", job_id)
    return why


async def _ask(*command: str) -> tuple[str, str]:
    """Run a command of Slurm's; return why that failed (nothing if it did not), and what it printed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return error.strerror or "cannot be run", ""
    try:
        printed, complained = await asyncio.wait_for(process.communicate(), _ANSWER_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"no answer within {_ANSWER_TIMEOUT_S:.0f} s", ""
    failed = f"exit code {process.returncode}" if process.returncode else ""
    return failed and (complained.decode(errors="replace").strip() or failed), printed.decode(errors="replace")
