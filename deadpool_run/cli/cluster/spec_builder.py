"""Builds a `LaunchSpec` from resolved option values. Pure."""

import importlib.util
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from deadpool_run.agent.numa import BindingMode
from deadpool_run.agent.records import script_copy
from deadpool_run.agent.spec import DEFAULT_PRELOAD, LaunchSpec, Mode, StartMethod, Streams, Target
from deadpool_run.cli.cluster.nodes import Shape, cluster, host_of, machine_count, shape
from deadpool_run.cli.cluster.observers import chaos_plan, metrics_address, repair_command
from deadpool_run.cli.options import accepted_only
from deadpool_run.cli.options.machine import Surroundings
from deadpool_run.cli.options.resolve import Values, parse_duration_s
from deadpool_run.cli.options.table import BY_NAME
from deadpool_run.core.settings import MAX_GROUP, Settings
from deadpool_run.errors import UsageError
from deadpool_run.wire.checkpoints import DurableSpec

_MAX_NAME = 100
_RESUME_WORDS = frozenset({"auto", "never"})


class Launch(NamedTuple):
    """A job to start, and notes to print before, one sentence each."""

    spec: LaunchSpec
    notes: tuple[str, ...]


def plan(values: Values, argv: tuple[str, ...], here: Surroundings) -> Launch:
    """Return the job to launch. `argv` is the script with its arguments. Raises `UsageError`."""
    accepted_only.check(values, here.plugins)
    _refuse_another_machine(values, here)
    ranks = _ranks(values, here)
    wanted = shape(values)
    durable = _durable(values)
    keep_runs = values.optional_count("keep_runs", 0)
    start_method = _start_method(values, here.environment)
    devices = here.gpus if here.gpus >= ranks else 0  # fewer are shared, or not used
    settings = _settings(values, ranks, wanted, durable, start_method)
    run_id, directory = _names(values, here.fresh_run_id)
    target = _target(values, argv)
    spec = LaunchSpec(
        settings=settings,
        target=target,
        script=script_copy.read(target),
        nproc_per_node=ranks,
        run_id=run_id,
        named=run_id != here.fresh_run_id,
        run_dir=Path(values.text("run_dir") or here.state_dir / directory).absolute(),
        keep_runs=keep_runs if not values.text("run_dir") else None,
        log_dir=Path(values.text("log_dir")).absolute() if values.text("log_dir") else None,
        redirects=_streams(values, "redirects", ranks),
        tee=_streams(values, "tee", ranks),
        log_line_prefix_template=values.text("log_line_prefix_template"),
        local_ranks_filter=_local_ranks(values),
        duplicate_stdout_filters=split_needles(values.text("duplicate_stdout_filters")),
        duplicate_stderr_filters=split_needles(values.text("duplicate_stderr_filters")),
        snapshot_memory=values.nbytes("snapshot_memory") or 0,
        verbose=values.flag("verbose"),
        json_log=values.choice("log_format", ("text", "json")) == "json",
        metrics=metrics_address(values),
        on_repair=repair_command(values),
        chaos=chaos_plan(values, settings, run_id),
        role=values.text("role"),
        start_method=start_method,
        preload=tuple(dict.fromkeys((*DEFAULT_PRELOAD, *values.words("preload")))),
        python=here.environment.get("PYTHON_EXEC") or sys.executable,
        devices=devices,
        cpus=_cpus(values, max(ranks, devices), here),
        virtual_local_rank=values.flag("virtual_local_rank"),
        signals_to_handle=_signals(values),
        hang_timeout_s=values.seconds("hang_timeout", or_zero=True),
        cluster=cluster(values, wanted.machines, here.host_name, here.token),
        durable=durable,
    )
    notes = (*accepted_only.notes(values, ranks, several=wanted.machines > 1), *_notes(spec, wanted.machines))
    return Launch(spec, notes)


def _settings(
    values: Values, ranks: int, wanted: Shape, durable: DurableSpec | None, start_method: StartMethod
) -> Settings:
    """Return the coordinator's settings, with `ranks` on each node."""
    interval = values.count("capture_interval", 1)
    return Settings(
        world_size=ranks * wanted.nodes,
        nodes=wanted.nodes,
        spares=wanted.spares,
        spare_nodes=wanted.spare_nodes,
        replicas=values.count("replicas", 0),
        ranks_per_parity=_ranks_per_parity(values),
        durable=durable is not None and bool(durable.target),
        join_timeout_s=accepted_only.join_timeout_s(values),
        node_timeout_s=values.seconds("node_timeout"),
        max_restarts=values.optional_count("max_restarts", 0),
        hot_spares=_hot_spares(values, start_method),
        abort_timeout_s=values.seconds("abort_timeout"),
        repair_timeout_s=values.seconds("repair_timeout"),
        shutdown_timeout_s=values.seconds("shutdown_timeout"),
        capture_interval=interval,
        max_capture_interval=max(interval, Settings(world_size=1).max_capture_interval),
    )


def _notes(spec: LaunchSpec, machines: int) -> Iterator[str]:
    """Yield warnings about the machines and spares of the job, one sentence each."""
    settings, devices = spec.settings, spec.devices
    if machines == 2 and not (spec.cluster and spec.cluster.authority):
        survives = (
            "if the agent of one ends, the other continues"
            if settings.spare_nodes or settings.spares // settings.nodes >= spec.nproc_per_node
            else "a lost rank is replaced on its machine, but a lost machine needs another within --join-timeout"
        )
        yield (
            f"two machines: {survives}; if one loses its power or its link, both stop, unless there is a third machine as a "
            "spare (--spares 1n) or --authority"
        )
    if settings.hot_spares and settings.spares and devices == spec.nproc_per_node:
        yield (
            f"--spare-mode hot: each of the {devices} GPUs of this machine has a rank, so its spares stay warm; "
            f"with --nproc-per-node {devices - 1}, one GPU is free for a spare"
            if devices > 1
            else "--spare-mode hot: the GPU of this machine has a rank, so its spares stay warm"
        )


def directory_name(run_id: str) -> str:
    """Return the run's name as one safe component of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", run_id)[:_MAX_NAME].strip(".-") or "run"


def split_needles(text: str) -> tuple[str, ...]:
    """Split at commas; a doubled comma is a comma."""
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _refuse_another_machine(values: Values, here: Surroundings) -> None:
    if not values.flag("standalone") and machine_count(values) == 1:
        alone = "for several machines, add --nnodes N on each of them; for one machine, remove the option"
        host, _ = host_of(values.text("rdzv_endpoint"))
        if host and not (host.startswith("127.") or here.host_names & {host, host.partition(".")[0]}):
            raise values.refuse("rdzv_endpoint", "is another machine", alone)
        if values.optional_count("node_rank", 0):
            raise values.refuse("node_rank", "there is no other machine", alone)


def _ranks(values: Values, here: Surroundings) -> int:
    text = values.text("nproc_per_node")
    named = {"cpu": here.cpus, "gpu": here.gpus, "auto": here.gpus or here.cpus}
    if text not in named:
        if text.lstrip("-").isdigit():
            return values.count("nproc_per_node", 1)
        raise values.refuse("nproc_per_node", "not a number, auto, cpu or gpu", "write the number of ranks, such as 4")
    if not named[text]:
        raise values.refuse(
            "nproc_per_node",
            "no GPU found (no /dev/nvidia*, hidden by CUDA_VISIBLE_DEVICES, or torch's CPU build)",
            "write the number of ranks, or `cpu`",
        )
    return named[text]


def _cpus(values: Values, ranks: int, here: Surroundings) -> Mapping[int, frozenset[int]]:
    if not values.text("numa_binding"):
        return {}
    return here.bind(BindingMode(values.choice("numa_binding", list(BindingMode))), ranks)


def _names(values: Values, fresh_id: str) -> tuple[str, str]:
    """Return the run's name and that of its directory, which is new even if a rendezvous id is used again."""
    if values.text("run_id"):
        return values.text("run_id"), directory_name(values.text("run_id"))
    rendezvous_id = values.text("rdzv_id")
    if values.flag("standalone") or rendezvous_id in {"", "none"}:
        return fresh_id, directory_name(fresh_id)
    return rendezvous_id, directory_name(f"{rendezvous_id[: _MAX_NAME - len(fresh_id) - 1]}-{fresh_id}")


def _start_method(values: Values, environment: Mapping[str, str]) -> StartMethod:
    if environment.get("PYTHON_EXEC") and not values["start_method"].is_set:
        return StartMethod.SPAWN  # the fork server can only fork its own interpreter
    chosen = values.choice("start_method", ("forkserver", "spawn", "fork"))
    return StartMethod.SPAWN if chosen == "spawn" else StartMethod.FORKSERVER


def _hot_spares(values: Values, start_method: StartMethod) -> bool:
    hot = values.choice("spare_mode", ("warm", "hot")) == "hot"
    if hot and (values.flag("no_python") or start_method is not StartMethod.FORKSERVER):
        raise UsageError(
            "--spare-mode hot needs workers from the fork server\nremove --start-method, --no-python and PYTHON_EXEC, or use --spare-mode warm"
        )
    return hot


def _ranks_per_parity(values: Values) -> int:
    kind, _, count = values.text("redundancy").partition(":")
    if (kind, count) == ("copies", ""):
        return 1
    if kind != "xor" or not count.isdecimal() or not 2 <= int(count) <= MAX_GROUP:
        advice = f"write copies, or xor:K with 2 to {MAX_GROUP} ranks that share a parity, such as xor:4"
        raise values.refuse("redundancy", "not a kind of redundancy", advice)
    if values.count("replicas", 0) != 1:
        raise values.refuse(
            "replicas", "--redundancy xor keeps parities in place of copies", "remove one of the options"
        )
    if importlib.util.find_spec("numpy") is None:
        raise values.refuse(
            "redundancy", "parities are computed with numpy, which is not installed", "pip install numpy"
        )
    return int(count)


def _target(values: Values, argv: tuple[str, ...]) -> Target:
    module, program = values.flag("module"), values.flag("no_python")
    if module and program:
        raise UsageError("-m and --no-python exclude each other\nremove one of them")
    if values.flag("run_path"):
        return Target(Mode.PATH, (str(Path(argv[0]).absolute()), *argv[1:]))
    mode = Mode.MODULE if module else Mode.EXEC if program else Mode.PATH
    return Target(mode, argv)


def _streams(values: Values, name: str, ranks: int) -> dict[int, Streams]:
    text = values.text(name)
    if not re.fullmatch(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        advice = "write 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one for each local rank: 0:3,1:2"
        raise values.refuse(name, "not a choice of streams", advice)
    parts = text.split(",") if ":" in text else [f"{rank}:{text}" for rank in range(ranks)]
    chosen = {int(rank): Streams(int(stream)) for rank, stream in (part.split(":") for part in parts)}
    return {rank: streams for rank, streams in chosen.items() if streams and rank < ranks}


def _local_ranks(values: Values) -> frozenset[int] | None:
    words = values.words("local_ranks_filter")
    if not all(word.isdecimal() for word in words):
        raise values.refuse("local_ranks_filter", "not a list of local ranks", "write numbers and commas: 0,2")
    return frozenset(int(word) for word in words) or None


def _durable(values: Values) -> DurableSpec | None:
    target, resume = values.text("durable"), values.text("resume")
    every = values.text("durable_every")
    every_steps = int(every) if every.isdecimal() else None
    every_s = parse_duration_s(every) if every_steps is None and every[-1:].isalpha() else None
    if not (every_steps or every_s):
        raise values.refuse(
            "durable_every", "not a number of steps or a time", "write steps, such as 100, or a time, such as 10m or 1h"
        )
    keep = values.count("durable_keep", 1)
    timeout_s = values.seconds("durable_timeout")
    exits = values.choice("on_usr1", ("exit", "save")) == "exit"
    if not resume:
        raise values.refuse("resume", "empty", "write auto, never, or the path of a checkpoint")
    if not target:
        nothing = resume in _RESUME_WORDS
        for name in ("durable_every", "durable_keep", "on_usr1", *(("durable_timeout",) if nothing else ())):
            if values[name].source == BY_NAME[name].flag:
                raise values.refuse(name, "has no effect without --durable", "name one with --durable")
        if nothing:
            return None
    return DurableSpec(
        target=_absolute(target),
        every_steps=every_steps,
        every_s=every_s,
        keep=keep,
        resume=resume if resume in _RESUME_WORDS else _absolute(resume),
        timeout_s=timeout_s,
        exit_on_usr1=exits,
    )


def _absolute(place: str) -> str:
    """Return a directory's absolute path; a URL or an empty text as it is."""
    return str(Path(place).absolute()) if place and "://" not in place else place


def _signals(values: Values) -> tuple[int, ...]:
    chosen: list[int] = []
    for word in values.words("signals_to_handle"):
        name = word if word.startswith("SIG") else f"SIG{word}"
        if name not in signal.Signals.__members__ or name in {"SIGKILL", "SIGSTOP", "SIGCHLD"}:
            raise values.refuse("signals_to_handle", f"{word} cannot be handled", "write names such as SIGTERM,SIGUSR1")
        chosen.append(signal.Signals[name].value)
    return tuple(chosen)
