"""What an option of the command line is, and the panels that help shows them in."""

from dataclasses import dataclass

TORCHRUN = "torchrun's options"
SPARES = "Spares and recovery"
DURABLE = "Durable checkpoints"
LOGS = "Output and logs"
RUN = "This run"
NODES = "Several machines"
INERT = "torchrun's options that mean little here (accepted, said once)"
PANELS = (TORCHRUN, SPARES, NODES, DURABLE, LOGS, RUN, INERT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. Its long flag, its environment variables and its key in a file all follow from `name`."""

    name: str
    """Words joined by `_`, as in torchrun's destination."""
    panel: str
    metavar: str | None
    """None: a flag that takes no value."""
    help: str
    default: str = ""
    """As it would be written on the command line; empty: not set, and `help` says what happens then."""
    short: str = ""
    torchrun: bool = True
    """torchrun has it too, so that its `PET_*` variable counts."""
    env: bool = True
    """False: neither variable is read."""
    also_read: tuple[str, ...] = ()
    """Variables of torch's own beside `PET_*`, weaker than it."""
    in_file: bool = True
    """False: it makes no sense in a configuration file."""

    @property
    def flag(self) -> str:
        """The long spelling, with dashes."""
        return "--" + self.name.replace("_", "-")

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that set it, the stronger first."""
        if not self.env:
            return ()
        upper = self.name.upper()
        return (f"DEADPOOL_{upper}", *((f"PET_{upper}",) if self.torchrun else ()), *self.also_read)

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.metavar is None
