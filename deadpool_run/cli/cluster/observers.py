"""Options for what accompanies a job: metrics, a command after repairs, a chaos run. Raises `UsageError`."""

import shlex
import shutil
import zlib
from importlib.util import find_spec

from deadpool_run.agent.chaos.plan import ChaosPlan
from deadpool_run.cli.cluster.nodes import host_of
from deadpool_run.cli.options.chaos_plan import Limits, read_plan
from deadpool_run.cli.options.resolve import Values
from deadpool_run.core.settings import Settings

_LOOPBACK = "127.0.0.1"
_MAX_PORT = 65535
_SEEDS = 1_000_000


def metrics_address(values: Values) -> tuple[str, int] | None:
    """Return host and port of --metrics-port; None without it."""
    text = values.text("metrics_port")
    if not text:
        return None
    host, port = ("", text) if text.isdecimal() else host_of(text)
    if not port.isdecimal() or not 0 <= int(port) <= _MAX_PORT:
        raise values.refuse("metrics_port", "not a port", "write for example 9400, or 0.0.0.0:9400 for all interfaces")
    if find_spec("prometheus_client") is None:
        raise values.refuse("metrics_port", "prometheus-client is not installed", "pip install 'deadpool-run[metrics]'")
    return host or _LOOPBACK, int(port)


def repair_command(values: Values) -> tuple[str, ...]:
    """Return program and arguments of --on-repair; empty without it."""
    text = values.text("on_repair")
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise values.refuse("on_repair", f"quotes do not match: {error}", "quote it as for a shell") from error
    if words and shutil.which(words[0]) is None:
        raise values.refuse(
            "on_repair", f"no program {words[0]!r}", "name a program; for a shell's line write `sh -c '...'`"
        )
    if text and not words:
        raise values.refuse("on_repair", "no program", "name a program and its arguments")
    return words


def chaos_plan(values: Values, settings: Settings, run_id: str) -> ChaosPlan | None:
    """Return the plan of --chaos; None without it. Unless the plan has a seed, it is that of the run's name."""
    text = values.text("chaos")
    if not text:
        return None
    limits = Limits(
        settings.world_size,
        has_spares=bool(settings.spares or settings.spare_nodes),
        finds_hangs=values.seconds("hang_timeout", or_zero=True) > 0,
        nodes=settings.nodes + settings.spare_nodes,
    )
    return read_plan(text, zlib.crc32(run_id.encode()) % _SEEDS, limits)
