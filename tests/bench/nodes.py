"""The interruption of training when a machine is lost: deadpool-run with a spare machine, and torchrun --nnodes=2:3.

    python tests/bench/nodes.py [--losses 10] [--torchrun-losses 5] [--spare-mode warm] [--mib 512] [--parallel ddp] [--quick]

Three network namespaces are the machines, and two of them have ranks. A machine is lost in one of three ways:

* power: SIGKILL of all its processes. Its connections close, but that does not prove its end.
* agent: SIGKILL of its agent only. Its fork server tells the others.
* link: every packet is dropped.

A loss of power or link is found by silence, after --node-timeout. The measured time starts just before the loss and ends
with the first step that every rank has completed after it. Then an agent is started on the lost machine, which becomes the
next spare machine. Every machine with ranks can be lost, also the leader's. Only torchrun's first machine is never lost,
since that ends the job. With --spare-mode hot, the lost machine is the one whose rank the spare machine has rehearsed.
torchrun's script writes a checkpoint after every step.

Before the losses, two machines with two ranks each train without a loss. The commit latency of a snapshot is the time from the
end of the last rank's step until `status`, polled every 50 ms, shows the version as committed. The steps that a loss would
repeat are those that some rank has completed since the committed version, at any moment of that time. With --mib the model is linear
layers under DDP or FSDP2 with a state of that size in each rank, each machine has one rank all the time, and torchrun is left
out.
"""

import argparse
import random
import sys
import tempfile
import time
import uuid
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import BASELINE, GPT, BenchError, header, quantile, result, table
from fleet import STATUS_S, Fleet, link_bytes_per_s
from kit import netns
from kit.netns import Hosts

HOSTS = 3
RANKS = 2
PORT = 29400
FOREVER = 10**6
BOUND_S = 120.0
TORCHRUN_BOUND_S = 240.0
LINK_BYTES = 4 << 30
PARTS = ("promoted", "aborted", "rehearsed", "restored", "attached", "first_step")
LAYOUTS = ("ddp", "fsdp2", "hsdp")
BIG_STATE = Path(__file__).resolve().parent / "big_state_train.py"
MIB = 1 << 20
SNAPSHOTS, QUICK_SNAPSHOTS = 30, 6
"""The number of snapshots to count. It is large because nodes report their traffic only at intervals."""
NEWS_S = 2.5
"""Longer than the interval of the nodes' traffic reports."""


@dataclass(frozen=True)
class Loss:
    """One loss, timed from outside, and the launcher's report of it (none under torchrun). Times are in seconds."""

    total_s: float
    detected_s: float = 0.0
    led: bool = False
    """Whether the lost machine was the leader."""
    parts: tuple[float, ...] = ()
    """The time of each of `PARTS`, after the loss was known."""
    fetched_bytes: int = 0
    """0 if the spare machine held the copy itself."""
    fetched_s: float = 0.0
    exposed_s: float | None = None
    steps_repeated: int = 0
    """Steps that some rank had completed and had to complete again."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=10, help="losses of each kind under deadpool-run")
    parser.add_argument("--torchrun-losses", type=int, default=5, help="losses under torchrun; 0 leaves it out")
    parser.add_argument("--node-timeout", type=float, default=5.0)
    parser.add_argument(
        "--size", default="small", help="size of recipes/gpt; small has a state of 38 MiB, with the optimizer"
    )
    parser.add_argument("--mib", type=int, default=0, help="state per rank, with linear layers in place of recipes/gpt")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp", help="with --mib")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spare-mode", choices=("warm", "hot"), default="warm", help="spare mode of the spare machine")
    parser.add_argument("--quick", action="store_true", help="2 losses of each kind, 1 under torchrun")
    args = parser.parse_args()
    if args.quick:
        args.losses, args.torchrun_losses = min(2, args.losses), min(1, args.torchrun_losses)
    if args.mib:
        args.torchrun_losses = 0
    return args


# --- deadpool-run ----------------------------------------------------------------------------------------------------


def deadpool(args: argparse.Namespace, home: Path, hosts: Hosts, nproc: int, *script: object, spares: int = 1) -> Fleet:
    """Return a run of recipes/gpt, or of a large state, under deadpool-run on all hosts. `spares` of them are spare."""
    gpt = ("--size", args.size, "--batch", args.batch, "--steps", FOREVER, *script, "--digest-dir", home / "digests")
    big = (BIG_STATE, "--mib", args.mib, "--parallel", args.parallel)
    training = big if args.mib else (GPT, *gpt)

    def command(host: int, endpoint: str) -> Sequence[object]:
        return (
            *(
                sys.executable,
                "-m",
                "deadpool_run",
                "--no-config",
                "--node-name",
                f"h{host}",
                "--run-dir",
                home / "run",
            ),
            *("--nnodes", len(hosts.names), "--spares", f"{spares}n", "--nproc-per-node", nproc),
            *("--rdzv-endpoint", endpoint, "--node-timeout", args.node_timeout, "--spare-mode", args.spare_mode),
            *(*training, "--step-log", home / "steps"),
        )

    ranks = nproc * (len(hosts.names) - spares)
    token = {"DEADPOOL_TOKEN": uuid.uuid4().hex}
    return Fleet(home, hosts, ranks, command, f"{hosts.addresses[0]}:{PORT}", token)


def is_calm(run: Fleet, since: int, *, hot: bool) -> bool:
    """Tell whether all machines have joined, a spare is ready, all copies exist, and 5 steps were completed after `since`."""
    status = run.status()
    return bool(
        status
        and status["phase"] == "running"
        and len(status["nodes"]) == HOSTS
        and any(spare["phase"] == "ready" and (spare["prepared"] is not None or not hot) for spare in status["spares"])
        and status["exposed_ms"] is None
        and run.completed() >= since + 5
    )


def lose_one(run: Fleet, hosts: Hosts, kind: str, dice: random.Random) -> Loss:
    """Lose a machine, wait for its replacement, and start it again."""
    before = run.status()
    reported = {incident["epoch"] for incident in run.incidents()}
    pids = [run.last(rank).pid for rank in range(RANKS)]
    time.sleep(dice.uniform(0.0, 0.3))  # the random time of the loss, not a wait
    rehearsed = [spare["prepared"] for spare in before["spares"] if spare["prepared"] is not None]
    rank = rehearsed[0] if rehearsed else dice.randrange(RANKS)
    host = run.host_of(pids[rank])
    led = before["coordinator"]["node"].partition("~")[0] == f"h{host}"
    if kind == "power":
        began_ns = run.kill(host)
    else:
        began_ns = time.monotonic_ns()
        run.agents[host].process.kill() if kind == "agent" else hosts.cut(host)
    run.wait(f"rank {rank} was replaced", lambda: run.last(rank).pid != pids[rank], BOUND_S)
    first = next(stamp for stamp in run.logs[rank].stamps if stamp.pid not in pids and stamp.ns > began_ns)
    run.wait(f"all had completed step {first.step}", lambda: run.completed() > first.step, BOUND_S)
    ends = [max(stamp.ns for stamp in log.read() if stamp.step == first.step) for log in run.logs]
    total_s = (max(ends) - began_ns) / 1e9
    incident = run.wait(
        "the repair was reported", lambda: [each for each in run.incidents() if each["epoch"] not in reported], 30
    )[-1]
    run.wait("copies were complete", lambda: _covered(run), BOUND_S, STATUS_S)
    heard_from = time.monotonic() + NEWS_S
    after = run.wait(
        "all machines had reported", lambda: time.monotonic() > heard_from and _covered(run), BOUND_S, STATUS_S
    )
    fetched = _fetched(after, before, rank)
    if kind != "power":
        run.kill(host)
    if kind == "link":
        hosts.mend(host)
    leads = next(node for node in after["nodes"] if node["node"] == after["coordinator"]["node"])
    run.start(host, f"{leads['address']}:{leads['port']}")
    exposed = next((i["exposed_s"] for i in after["incidents"] if i["epoch"] == incident["epoch"]), None)
    steps = incident["steps_repeated"]
    return Loss(total_s, total_s - incident["first_step_s"], led, _parts(incident), *fetched, exposed, steps)


def _covered(run: Fleet) -> dict[str, Any]:
    """Return the status when only the spare machine is missing, and all machines have reported since then."""
    status = run.status()
    if not status or status["phase"] != "running" or status["exposed_ms"] is not None:
        return {}
    return status if status["incidents"] and status["incidents"][-1]["exposed_s"] is not None else {}


def _fetched(after: dict[str, Any], before: dict[str, Any], rank: int) -> tuple[int, float]:
    """Return the bytes that the replacement fetched, and the time in seconds. Zeros if it had the copy."""
    known = {node["node"]: node["copies"] for node in before["nodes"]}
    home = next(node for node in after["nodes"] if rank in node["ranks"])
    now, then = home["copies"] or {}, known.get(home["node"]) or {}
    if not now or now["fetched_s"] == then.get("fetched_s", 0.0):
        return 0, 0.0
    return now["fetched_bytes"], now["fetched_s"]


def _parts(incident: dict[str, Any]) -> tuple[float, ...]:
    """Return the time that each part added, in the order of `PARTS`. Parts overlap."""
    reached, parts = 0.0, []
    for name in PARTS:
        parts.append(max(0.0, incident[f"{name}_s"] - reached))
        reached = max(reached, incident[f"{name}_s"])
    return tuple(parts)


def lose_often(args: argparse.Namespace, home: Path, hosts: Hosts, kind: str) -> list[Loss]:
    dice, found, hot = random.Random(args.seed), [], args.spare_mode == "hot"
    with deadpool(args, home, hosts, 1) as run:
        since = 0
        for _ in range(args.losses):
            run.wait("all was calm", lambda since=since: is_calm(run, since, hot=hot), BOUND_S, STATUS_S)
            found.append(lose_one(run, hosts, kind, dice))
            since = run.completed()
            print(f"  {kind}: {1e3 * found[-1].total_s:.0f} ms{', the leader' if found[-1].led else ''}", flush=True)
    return found


# --- torchrun --------------------------------------------------------------------------------------------------------


def torchrun(args: argparse.Namespace, home: Path, hosts: Hosts) -> Fleet:
    """Return the training with checkpoints under torchrun --nnodes=2:3, which waits 5 s, not 30 s, for more machines."""

    def command(host: int, endpoint: str) -> Sequence[object]:
        return (
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes=2:3",
                "--nproc-per-node=1",
                "--rdzv-backend=c10d",
            ),
            *(f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench", "--max-restarts=1000"),
            *(f"--rdzv-conf=last_call_timeout=5,is_host={int(host == 0)}", f"--local-addr={hosts.addresses[host]}"),
            *(BASELINE, "--size", args.size, "--batch", args.batch, "--steps", FOREVER),
            *("--step-log", home / "steps", "--digest-dir", home / "digests"),
        )

    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    return Fleet(home, hosts, HOSTS, command, f"{hosts.addresses[0]}:{PORT}", env)


def lose_under_torchrun(args: argparse.Namespace, home: Path, hosts: Hosts) -> list[Loss]:
    """Return the losses that the job survived."""
    dice, found = random.Random(args.seed), []
    with torchrun(args, home, hosts) as run:
        try:
            for _ in range(args.torchrun_losses):
                run.wait("three machines train", lambda: _whole(run), TORCHRUN_BOUND_S, STATUS_S)
                found.append(_lose_under_torchrun(run, hosts, dice.choice((1, 2))))
                print(f"  torchrun: {found[-1].total_s:.1f} s", flush=True)
        except BenchError as error:
            print(f"  torchrun did not recover: {str(error).splitlines()[0]}", flush=True)
    return found


def _whole(run: Fleet) -> bool:
    """Tell whether every host's process has completed one of the last steps."""
    if not all(log.read() for log in run.logs):
        return False
    homes = {host for host in run.agents for rank in range(HOSTS) if run.last(rank).pid in _pids(run, host)}
    return len(homes) == HOSTS and run.completed() + 2 > max(run.last(rank).step for rank in range(HOSTS))


def _pids(run: Fleet, host: int) -> set[int]:
    from kit.processes import marked  # noqa: PLC0415 - its path is set by `fleet`

    return set(marked(run.agents[host].mark))


def _lose_under_torchrun(run: Fleet, hosts: Hosts, host: int) -> Loss:
    before = {stamp.pid for log in run.logs for stamp in log.read()}
    began_ns = run.kill(host)

    def first_steps() -> list[int]:
        """Return the time when each rank of the smaller world first completed a step. Other ranks may exist for a while."""
        new = [[stamp.ns for stamp in log.read() if stamp.pid not in before] for log in run.logs[:RANKS]]
        return [each[0] for each in new] if all(new) else []

    ends = run.wait("the others had completed a step", first_steps, TORCHRUN_BOUND_S)
    run.start(host, run.endpoint)
    return Loss((max(ends) - began_ns) / 1e9)


# --- snapshots -------------------------------------------------------------------------------------------------------


def commit_ranks(args: argparse.Namespace) -> int:
    """Return the number of ranks on each machine while commits are measured; a large state has one, as in the losses."""
    return 1 if args.mib else 2


def snapshots(args: argparse.Namespace, home: Path) -> dict[str, dict[str, float]]:
    """Return, for each layout on 2 machines, the bytes sent per snapshot, the commit latency and the time of a step."""
    found = {}
    for layout in (args.parallel,) if args.mib else LAYOUTS:
        hosts = Hosts(2)
        try:
            with deadpool(args, home / layout, hosts, commit_ranks(args), "--parallel", layout, spares=0) as run:
                found[layout] = _commits(run, QUICK_SNAPSHOTS if args.quick else SNAPSHOTS)
            print(f"  {layout}: {found[layout]['sent_mib_per_snapshot']:.1f} MiB a snapshot", flush=True)
        finally:
            hosts.close()
    return found


def _commits(run: Fleet, count: int) -> dict[str, float]:
    """Return figures of `count` committed snapshots. Skipped captures do not count."""
    seen: dict[int, tuple[int, int]] = {}
    """For each version, the bytes sent and the time when it was first seen as committed."""

    def enough() -> bool:
        status = run.status()
        copies = [node["copies"] for node in status.get("nodes", ())]
        if copies and all(copies) and status["committed"] is not None:
            sent = sum(each["sent_bytes"] for each in copies)
            seen.setdefault(status["committed"], (sent, time.monotonic_ns()))
        return len(seen) > count

    run.wait("enough snapshots are committed", enough, BOUND_S, STATUS_S)
    (first, _), *_, (last, _) = seen.values()
    ends: dict[int, int] = {}
    first_ends: dict[int, int] = {}
    for log in run.logs:
        for stamp in log.read():
            version = stamp.step + 1
            ends[version] = max(stamp.ns, ends.get(version, 0))
            first_ends[version] = min(stamp.ns, first_ends.get(version, stamp.ns))
    latencies = [
        (at - ends[version]) / 1e9 for version, (_, at) in [*seen.items()][1:]
    ]  # the first was committed before `seen`
    steps = [later - earlier for earlier, later in pairwise(sorted(seen))]
    pairs = pairwise(sorted(ends.values()))
    return {
        "step_p50_s": median((later - earlier) / 1e9 for earlier, later in pairs),
        "sent_mib_per_snapshot": (last - first) / (len(seen) - 1) / MIB,
        "latency_p50_s": median(latencies),
        "latency_max_s": max(latencies),
        "steps_per_snapshot_p50": median(steps),
        **_at_risk(first_ends, {version: at for version, (_, at) in seen.items()}),
    }


def _at_risk(ends: dict[int, int], committed: dict[int, int]) -> dict[str, float]:
    """Return how many steps a loss would have repeated, at the 95th and 99th percentile of all moments, and at most.

    `ends`: when the first rank completed the steps of a version. `committed`: when it was committed.
    """
    begin, end = min(committed.values()), max(committed.values())
    moments = sorted({at for at in (*ends.values(), *committed.values()) if begin <= at <= end})
    times: dict[int, int] = defaultdict(int)
    for since, until in pairwise(moments):
        done = max((version for version, at in ends.items() if at <= since), default=0)
        safe = max(version for version, at in committed.items() if at <= since)
        times[done - safe] += until - since
    counts = sorted(times)
    shares = list(accumulate(times[steps] / (end - begin) for steps in counts))
    p95, p99 = (counts[bisect_left(shares, share)] for share in (0.95, 0.99))
    return {"at_risk_p95": p95, "at_risk_p99": p99, "at_risk_max": counts[-1]}


# --- results ---------------------------------------------------------------------------------------------------------


def show(found: dict[str, list[Loss]], link: float) -> dict[str, Any]:
    rows: list[list[object]] = [
        ["loss to first step, ms", "losses", "p50", "p95", "max", "detected p50", "p95", "steps repeated"]
    ]
    values: dict[str, Any] = {}
    for name, losses in _split(found).items():
        times, detected = [each.total_s for each in losses], [each.detected_s for each in losses]
        numbers = [median(times), quantile(times, 0.95), max(times)]
        seen = [median(detected), quantile(detected, 0.95)] if losses[0].parts else []
        steps = f"<= {max(each.steps_repeated for each in losses)}" if seen else ""
        rows.append([name, len(losses), *map(_ms, numbers), *(map(_ms, seen) if seen else ("", "")), steps])
        values[name.strip()] = {"total_s": [round(value, 4) for value in times]}
        if seen:
            values[name.strip()]["detected_s"] = [round(value, 4) for value in detected]
    table(rows)
    values["parts_p50_s"] = _show_parts(found)
    values["transfer"] = _show_transfer(found, link)
    return values


def _split(found: dict[str, list[Loss]]) -> dict[str, list[Loss]]:
    """Return the losses by kind, and those of the leader's machine separately."""
    split = {}
    for name, losses in found.items():
        split[name] = losses
        split[f"  {name}, of the leader"] = [each for each in losses if each.led]
        split[f"  {name}, of another node"] = [each for each in losses if each.parts and not each.led]
    return {name: losses for name, losses in split.items() if losses}


def _show_parts(found: dict[str, list[Loss]]) -> dict[str, list[float]]:
    rows: list[list[object]] = [["added after the loss was known, ms, p50", *PARTS, "copies complete after"]]
    middle = {}
    for name, losses in found.items():
        if losses and losses[0].parts:
            middle[name] = [median(each.parts[at] for each in losses) for at in range(len(PARTS))]
            exposed = [each.exposed_s for each in losses if each.exposed_s is not None]
            rows.append([name, *map(_ms, middle[name]), _ms(median(exposed)) if exposed else "-"])
    table(rows)
    return middle


def _show_transfer(found: dict[str, list[Loss]], link: float) -> dict[str, float]:
    brought = [each for losses in found.values() for each in losses if each.fetched_bytes]
    values = {"link_gb_per_s": link / 1e9}
    if brought:
        rates = [each.fetched_bytes / each.fetched_s for each in brought]
        values |= {"gb_per_s_p50": median(rates) / 1e9, "ms_p50": 1e3 * median(each.fetched_s for each in brought)}
        mib = median(each.fetched_bytes for each in brought) / MIB
        print(
            f"state: {len(brought)} replacements fetched {mib:.0f} MiB each, in {values['ms_p50']:.0f} ms (p50, with the "
            f"connection), {values['gb_per_s_p50']:.2f} GB/s; the others had a copy"
        )
    print(f"a plain loop of sendfile and recv_into between these namespaces: {values['link_gb_per_s']:.2f} GB/s")
    return values


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def measure(args: argparse.Namespace, home: Path) -> tuple[dict[str, list[Loss]], float]:
    found: dict[str, list[Loss]] = {}
    hosts = Hosts(HOSTS)
    try:
        link = max(link_bytes_per_s(hosts, LINK_BYTES) for _ in range(3))
        for kind in ("power", "agent", "link") if args.losses else ():
            found[f"deadpool-run, {kind}"] = lose_often(args, home / kind, hosts, kind)
        if args.torchrun_losses:
            found["torchrun, power"] = lose_under_torchrun(args, home / "torchrun", hosts)
    finally:
        hosts.close()
    return found, link


def main() -> int:
    args = options()
    if why := netns.refused():
        print(f"nodes: {why}", file=sys.stderr)
        return 1
    header("nodes", vars(args))
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as home:
        try:
            committed = snapshots(args, Path(home))
            found, link = measure(args, Path(home))
            values = {**show(found, link), "snapshots": committed}
        except BenchError as error:
            print(f"nodes: {error}", file=sys.stderr)
            return 1
    rows = [
        [
            layout,
            f"{each['sent_mib_per_snapshot']:.1f}",
            *(_ms(each[name]) for name in ("step_p50_s", "latency_p50_s", "latency_max_s")),
            f"{each['steps_per_snapshot_p50']:g}",
            *(each[name] for name in ("at_risk_p95", "at_risk_p99", "at_risk_max")),
        ]
        for layout, each in values["snapshots"].items()
    ]
    titles = [
        "MiB sent per snapshot",
        "step, ms, p50",
        "commit latency, ms, p50",
        "max",
        "steps between snapshots, p50",
        "steps that a loss would repeat, p95",
        "p99",
        "max",
    ]
    table([[f"{2 * commit_ranks(args)} ranks on 2 machines, sum of all ranks", *titles], *rows])
    result("nodes", {"parameters": vars(args), "results": values})
    return 0


if __name__ == "__main__":
    sys.exit(main())
