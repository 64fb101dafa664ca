"""Cancels a Slurm job whose batch host is dead, since only an agent is left to do so.

When the first node dies, the batch script and `srun` die with it. The tasks of the other nodes run to their end, but then
the job would hold its nodes until its time limit (measured with Slurm 22.05, whether or not Slurm has noticed the dead
node).
"""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from deadpool_run.agent.records.run_record import RECORD_NAME
from deadpool_run.agent.rendezvous import leader_file
from deadpool_run.agent.slurm import hostlist
from deadpool_run.agent.slurm.command import run_command
from deadpool_run.agent.slurm.discovery import Discovery
from deadpool_run.errors import UsageError
from deadpool_run.wire.typed import read_object

_CONNECT_TIMEOUT_S = 3.0


async def cancel_if_srun_is_gone(
    place: Discovery | None, living: Collection[str], print_line: Callable[[str], None]
) -> bool:
    """Cancel our batch job if the `srun` that started us is gone; return whether it was cancelled.

    For the last agent of a run, after everything else is over: the SIGTERM that follows is for itself too. `living` has the
    names of the nodes whose agents were there to the end. A living `srun` waits for us and returns by itself, and the batch
    script continues. `srun` dies only with its node, so we probe it (it logs an empty message) only if the agent on that
    node was lost.
    """
    if place is None or place.step is None or not place.batch or not place.step.starter:
        return False
    if place.nodes[0] in living or await _listens(place.step.starter):
        return False
    print_line(
        f"srun at {place.step.starter} is gone, and with it the batch script: ending Slurm job {place.job_id} with scancel"
    )
    why, _ = await run_command("scancel", place.job_id)
    if why:
        print_line(f"scancel: {why}; job {place.job_id} holds its nodes until somebody runs `scancel {place.job_id}`")
    return not why


async def cancel_if_abandoned(place: Discovery | None, base: Path, print_line: Callable[[str], None]) -> bool:
    """Cancel our batch job if no node trains and nothing waits for it; return whether it was cancelled.

    For an agent that found no leader, such as where too few agents are left for a majority. This agent may be the one that
    is cut off, and must not end the others' work. Only the leader file in the run's directory `base` shows which it is.
    """
    if place is None or place.step is None or not place.batch or not place.step.starter:
        return False
    leads = leader_file.read(base)
    name = "" if leads is None else leads.node.partition("~")[0]  # a node that rejoined has a number after that
    has_ended = leads is not None and bool(read_object(Path(leads.run_dir) / RECORD_NAME).get("ended"))
    if leads is None:
        why = f"other nodes may be training, and the leader file in {base} cannot be read here"
    elif name != place.nodes[0] and not has_ended and await _may_live(place, name):
        why = f"node {leads.node} may be training"
    else:
        return await cancel_if_srun_is_gone(place, (), print_line)
    if not await _listens(place.step.starter):
        print_line(
            f"Slurm job {place.job_id} has lost its batch script, and is not cancelled: {why}; "
            f"if no node is, run `scancel {place.job_id}`"
        )
    return False


async def _may_live(place: Discovery, name: str) -> bool:
    """Return whether Slurm still counts the node among the job's: not if it has found the node dead."""
    if name not in place.nodes:
        return True  # the user gave it another name
    why, listed = await run_command("squeue", "--noheader", f"--jobs={place.job_id}", "--format=%N")
    try:
        return bool(why) or name in hostlist.expand(listed.strip())
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
