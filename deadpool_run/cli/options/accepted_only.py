"""torchrun's options without effect here: checked as torchrun checks them, and noted once. Pure."""

from collections.abc import Callable, Iterator

from deadpool_run.cli.options.option import INERT
from deadpool_run.cli.options.resolve import Values
from deadpool_run.cli.options.table import BY_NAME

_BACKENDS = frozenset({"static", "c10d", "etcd", "etcd-v2"})
_EVENT_HANDLERS = frozenset({"null", "console", "dynamic_rendezvous"})
_HEEDED = frozenset({"rdzv_id", "use_env"})
_HEEDED_AMONG_SEVERAL = frozenset({"master_addr", "master_port"})


def check(values: Values, plugins: Callable[[str], frozenset[str]]) -> None:
    """Refuse what torchrun would refuse. `plugins` returns the names of an entry point's group. Raises `UsageError`."""
    backend = values.text("rdzv_backend")
    if not values.flag("standalone") and backend not in _BACKENDS and backend not in plugins("torchrun.handlers"):
        raise values.refuse("rdzv_backend", "no such rendezvous backend", "write static or c10d, or remove the option")
    if values.text("event_log_handler") not in _EVENT_HANDLERS:
        raise values.refuse(
            "event_log_handler", "no such handler", f"write one of {', '.join(sorted(_EVENT_HANDLERS))}"
        )
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
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise values.refuse(
            "rdzv_conf", f"join_timeout={text} is not a positive number of seconds", "write join_timeout=600"
        )
    return seconds


def notes(values: Values, ranks: int, *, several: bool) -> Iterator[str]:
    """Yield a sentence for each option that is accepted but has no effect."""
    heeded = _HEEDED | (_HEEDED_AMONG_SEVERAL if several else frozenset())
    heeded |= {"rdzv_conf"} if set(rendezvous_settings(values)) == {"join_timeout"} and several else frozenset()
    inert = [option for option in BY_NAME.values() if option.panel == INERT and option.name not in heeded]
    unused = [values[option.name].source for option in inert if values[option.name].is_set]
    if unused and not values.flag("standalone"):
        yield f"no effect{'' if several else ' on one machine'}: {', '.join(unused)}"
    if values.text("start_method") == "fork":
        yield f"{values['start_method'].source} {values.text('start_method')}: workers are forked from the fork server"
    for name in ("redirects", "tee", "local_ranks_filter"):
        absent = sorted({number for word in values.words(name) if (number := _rank(word)) >= ranks})
        if absent and (name == "local_ranks_filter" or ":" in values.text(name)):
            yield f"{values[name].source} {values.text(name)}: there is no local rank {', '.join(map(str, absent))}"


def _rank(word: str) -> int:
    number = word.partition(":")[0]
    return int(number) if number.isdecimal() else -1
