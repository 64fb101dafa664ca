"""`deadpool-run kill-rank`: faults on purpose, to see ranks replaced."""

import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from deadpool_run.agent.chaos.victims import ACTIVITIES, REPAIRED_IN, UNREPAIRED, Victims
from deadpool_run.agent.console import tell
from deadpool_run.cli.confirm import confirmed
from deadpool_run.cli.options.fault_kind import KINDS, SLOW_S, fault_kind
from deadpool_run.cli.options.resolve import duration_s
from deadpool_run.cli.runs.client import ControlClient
from deadpool_run.cli.runs.find import RunDir, RunId, connect_run
from deadpool_run.core.injection import HANGS, KillHow, Slowness
from deadpool_run.errors import RequestRefusedError, UsageError
from deadpool_run.view.health import Status, ready_spares

_LOOK_S = 0.1


def kill_rank(  # noqa: PLR0913 - one parameter for each option
    rank: Annotated[
        int | None, typer.Argument(metavar="[RANK]", min=0, help="The rank to kill.", show_default=False)
    ] = None,
    *,
    how: Annotated[
        str,
        typer.Option(
            "--how",
            metavar="|".join(KINDS),
            autocompletion=lambda: [*KINDS],
            help="Signal to send. exit: exits with code 1. hang: lives and does nothing. oom: gets OutOfMemoryError. "
            "slow:F: everything takes F times as long.",
        ),
    ] = KillHow.SIGKILL.value,
    slow_for: Annotated[str, typer.Option("--for", metavar="TIME", help="With slow:F: how long.  [default: 60s]")] = "",
    at_random: Annotated[bool, typer.Option("--random", help="Kill a random rank.")] = False,
    node: Annotated[str | None, typer.Option(metavar="NAME", help="Kill all ranks of this node.")] = None,
    spare: Annotated[bool, typer.Option("--spare", help="Kill a spare that is ready.")] = False,
    agent: Annotated[bool, typer.Option("--agent", help="Kill the agent of --node: the node is lost.")] = False,
    at_step: Annotated[
        int | None, typer.Option("--at-step", metavar="N", min=0, help="Wait until a rank has completed N steps.")
    ] = None,
    phase: Annotated[
        str,
        typer.Option(
            metavar="|".join(ACTIVITIES),
            autocompletion=lambda: [*ACTIVITIES],
            help="Wait until the rank is seen in this phase. Only with RANK.",
        ),
    ] = "",
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Kill N times.")] = 1,
    every: Annotated[str, typer.Option(metavar="TIME", help="Time between two kills.")] = "30s",
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the random choices.")] = None,
    run_dir: RunDir = None,
    run_id: RunId = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Don't ask, and kill also where the job is not protected.")
    ] = False,
) -> None:
    """Kill a rank's process in a live run, to see it replaced. The run records the loss as injected."""
    if agent:
        if rank is not None or at_random or spare or phase or count > 1 or slow_for or how != KillHow.SIGKILL:
            raise UsageError(
                "--agent: goes with --node and --at-step only, and sends SIGKILL\nremove the other options"
            )
        with connect_run(run_dir, run_id, os.environ) as run:
            _kill_agent(run, node, at_step, yes=yes)
        return
    target = Victims(rank, at_random, node, spare)
    every_s = duration_s("--every", every, "makes no pause")
    if phase and phase not in ACTIVITIES:
        raise UsageError(f"--phase {phase!r}: not a phase\nwrite one of {', '.join(ACTIVITIES)}")
    if phase and target.rank is None:
        raise UsageError(
            f"--phase: needs a RANK, and {target.words()[0]} names none\nwrite `kill-rank 2 --phase {phase}`"
        )
    kind = _kind(how, slow_for, spare=spare)
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    with connect_run(run_dir, run_id, os.environ) as run:
        status: Status = run.ask({"do": "status"})
        target.chosen(status, draw if seed is None else random.Random(seed))  # noqa: S311 - refuse at once what does not exist
        _agree(f"{target.description()} of {run.run_dir.name} with {kind}", status, spare=spare, yes=yes)
        for number in range(count):
            if number:
                time.sleep(every_s)
            status = (
                _awaited(run, target, at_step, phase) if at_step is not None or phase else run.ask({"do": "status"})
            )
            _kill(run, target.chosen(status, draw), kind, spare=spare, yes=yes)


def _kind(how: str, slow_for: str, *, spare: bool) -> KillHow | Slowness:
    """Return the kind of fault. Raises `UsageError`."""
    kind = fault_kind(how, duration_s("--for", slow_for) if slow_for else SLOW_S)
    if isinstance(kind, str) and not isinstance(kind, KillHow):
        raise UsageError(f"--how {how!r}: {kind}")
    if slow_for and not isinstance(kind, Slowness):
        raise UsageError("--for: only a slow rank has a time\nadd for example --how slow:3, or remove --for")
    if spare and isinstance(kind, Slowness):
        raise UsageError("--spare: a spare has no steps to slow\nname a rank")
    return kind


def _agree(what: str, status: Status, *, spare: bool, yes: bool) -> None:
    """Ask on a terminal. Elsewhere refuse what would end the job, unless --yes is there. Raises `RequestRefusedError`."""
    if not spare and not ready_spares(status):
        tell("no spare is ready: the rank will be started again")
    hurts = not spare and status.get("phase") not in REPAIRED_IN
    warning = f"The job is not protected: {UNREPAIRED}. " if hurts else ""
    if not yes and not confirmed(f"{warning}Kill {what}?") and hurts:
        raise RequestRefusedError(
            f"the job is not protected now ({status.get('phase')}): {UNREPAIRED}\n"
            "wait until `deadpool-run status` shows it running, or add --yes"
        )


def _awaited(run: ControlClient, target: Victims, at_step: int | None, phase: str) -> Status:
    """Return the first status in which the step is reached and the rank is seen in the phase. Raises `RequestRefusedError`."""
    with ControlClient(run.run_dir) as viewer:
        for status in viewer.watch(_LOOK_S):
            if target.reached(status, at_step or 0) and target.seen_in(status, phase):
                return status
    raise RequestRefusedError("the run ended before the step or phase was reached")


def _kill(
    run: ControlClient, chosen: Sequence[Mapping[str, Any]], how: KillHow | Slowness, *, spare: bool, yes: bool
) -> None:
    if isinstance(how, Slowness):
        for each in chosen:
            done = run.ask({"do": "slow-rank", "rank": each["rank"], "factor": how.factor, "for_s": how.for_s})
            sys.stdout.write(f"rank {done['rank']}: worker {done['worker']} (pid {done['pid']}) {how.description()}\n")
        sys.stdout.flush()
        return
    is_found = True
    told = {KillHow.EXIT: "exit", KillHow.HANG: "hang", KillHow.OOM: "exit" if spare else "run out of memory"}
    fate = f"was told to {told[how]}" if how in told else f"was sent {how.name}"
    for each in chosen:
        if spare:
            run.ask({"do": "kill-spare", "worker": each["worker"], "how": how.value})
            sys.stdout.write(f"spare: worker {each['worker']} (pid {each['pid']}) {fate}\n")
        else:
            done = run.ask({"do": "kill-rank", "rank": each["rank"], "how": how.value, "force": yes})
            is_found = bool(done.get("is_found", True))
            sys.stdout.write(f"rank {done['rank']}: worker {done['worker']} (pid {done['pid']}) {fate}\n")
    sys.stdout.flush()
    if how in HANGS and not spare:
        finds = "the job finds it when no rank has made progress for --hang-timeout"
        tell(f"the process lives: {finds if is_found else 'the job does not find it, because --hang-timeout is 0'}")


def _kill_agent(run: ControlClient, node: str | None, at_step: int | None, *, yes: bool) -> None:
    what = "the agent" if node is None else f"the agent of node {node}"
    _agree(f"{what} of {run.run_dir.name}", run.ask({"do": "status"}), spare=False, yes=yes)
    if at_step is not None:
        _awaited(run, Victims(drawn=True), at_step, "")
    done = run.ask({"do": "kill-agent", "node": node, "force": yes})
    held = f" with ranks {', '.join(map(str, done['ranks']))}" if done["ranks"] else " without ranks"
    sys.stdout.write(f"node {done['node']}{held}: its agent was sent SIGKILL\n")
    sys.stdout.flush()
