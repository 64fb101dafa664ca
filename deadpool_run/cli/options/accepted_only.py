"""torchrun's options without effect here: checked as torchrun checks them, and noted once. Pure."""

from collections.abc import Callable, Iterator

from deadpool_run.cli.options.resolve import Values, parse_duration_s
from deadpool_run.cli.options.table_torchrun import INERT_OPTIONS

_BACKENDS = frozenset({"static", "c10d", "etcd", "etcd-v2"})


def check(values: Values, plugins: Callable[[str], frozenset[str]]) -> None:
    """Refuse what torchrun would refuse. `plugins` returns the names of an entry point's group. Raises `UsageError`."""
    backend = values.text("rdzv_backend")
    if not values.flag("standalone") and backend not in _BACKENDS and backend not in plugins("torchrun.handlers"):
        raise values.refuse("rdzv_backend", "no such rendezvous backend", "write static or c10d, or remove the option")
    values.choice("event_log_handler", ("null", "console", "dynamic_rendezvous"))
    specs = values.text("logs_specs")
    if specs and specs not in plugins("torchrun.logs_specs"):
        raise values.refuse("logs_specs", "no such plugin is installed", "remove the option, or install the plugin")
    if values.text("monitor_interval"):
        values.seconds("monitor_interval", or_zero=True)
    rendezvous_settings(values)


def rendezvous_settings(values: Values) -> dict[str, str]:
    """Return the settings of --rdzv-conf. Raises `UsageError`."""
    found = {}
    for word in values.words("rdzv_conf"):
        key, equals, value = word.partition("=")
        if not (key.strip() and equals and value.strip()):
            raise values.refuse("rdzv_conf", f"{word!r} is not a setting", "write NAME=VALUE, separated by commas")
        found[key.strip()] = value.strip()
    return found


def join_timeout_s(values: Values) -> float:
    """Return --join-timeout, else join_timeout of --rdzv-conf. Raises `UsageError`."""
    text = rendezvous_settings(values).get("join_timeout")
    if values["join_timeout"].is_set or text is None:
        return values.seconds("join_timeout")
    seconds = parse_duration_s(text) or 0.0
    if not 0 < seconds < float("inf"):
        raise values.refuse("rdzv_conf", f"join_timeout={text} is not a positive duration", "write join_timeout=600")
    return seconds


def notes(values: Values, ranks: int, *, several: bool) -> Iterator[str]:
    """Yield a sentence for each option that is accepted but has no effect. `values` must be valid."""
    heeded = {"rdzv_id", "use_env"}
    if several:
        heeded |= {"master_addr", "master_port"}
        if rendezvous_settings(values).keys() == {"join_timeout"}:
            heeded.add("rdzv_conf")
    unheeded = [values[option.name] for option in INERT_OPTIONS if option.name not in heeded]
    unused = [value.source for value in unheeded if value.is_set]
    if unused and not values.flag("standalone"):
        yield f"no effect{'' if several else ' on one machine'}: {', '.join(unused)}"
    if values.text("start_method") == "fork":
        yield f"{values['start_method'].source} {values.text('start_method')}: workers are forked from the fork server"
    for name in ("redirects", "tee", "local_ranks_filter"):
        if name == "local_ranks_filter" or ":" in values.text(name):
            named = {int(word.partition(":")[0]) for word in values.words(name)}
            if absent := sorted(rank for rank in named if rank >= ranks):
                yield f"{values[name].source} {values.text(name)}: there is no local rank {', '.join(map(str, absent))}"
