"""One option of the command line, and the panels of the help."""

from dataclasses import dataclass, replace

TORCHRUN = "torchrun's options"
SPARES = "Spares and recovery"
DURABLE = "Durable checkpoints"
LOGS = "Output and logs"
RUN = "This run"
NODES = "Several machines"
INERT = "Accepted for compatibility with torchrun (little or no effect)"
PANELS = (TORCHRUN, SPARES, NODES, DURABLE, LOGS, RUN, INERT)


@dataclass(frozen=True, slots=True)
class Option:
    """One option. Its long flag, environment variables and key in a file follow from `name`."""

    name: str
    """Words joined by `_`, as in torchrun's destination."""
    metavar: str | None
    """None: a flag that takes no value."""
    help: str
    panel: str = ""
    default: str = ""
    """As on the command line. Empty: not set, and `help` says what happens then."""
    short: str = ""
    torchrun: bool = True
    """torchrun has it too: its `PET_*` variable is read."""
    env: bool = True
    """False: neither variable is read."""
    also_read: tuple[str, ...] = ()
    """Variables of torch that are read after `PET_*`."""
    common: bool = False
    """In the short help."""
    in_file: bool = True
    """False: a configuration file cannot set it."""

    @property
    def flag(self) -> str:
        """The long spelling, with dashes."""
        return "--" + self.name.replace("_", "-")

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that set it, the strongest first."""
        if not self.env:
            return ()
        upper = self.name.upper()
        return (f"DEADPOOL_{upper}", *((f"PET_{upper}",) if self.torchrun else ()), *self.also_read)

    @property
    def choices(self) -> list[str]:
        """The values that the metavar names."""
        return choices_of(self.metavar or "")

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.metavar is None


_COMMON = frozenset(
    (
        *("nproc_per_node", "nnodes", "rdzv_endpoint", "max_restarts", "module", "spares", "spare_mode"),
        *("hang_timeout", "durable", "durable_every", "log_dir", "tee", "run_id", "dry_run", "verbose"),
    )
)


def group(panel: str, *options: Option, torchrun: bool) -> tuple[Option, ...]:
    """Return the options with their panel. `torchrun`: whether they are torchrun's."""
    return tuple(replace(option, panel=panel, torchrun=torchrun, common=option.name in _COMMON) for option in options)


def choices_of(metavar: str) -> list[str]:
    """Return the values that a metavar names, such as `auto|never|PATH`; words in capitals mean a kind of value."""
    words = metavar.split("|")
    return [word for word in words if word.islower()] if len(words) > 1 else []
