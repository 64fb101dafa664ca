"""Every option of `deadpool-run SCRIPT`, as data: parsing, help, `config show` and the documentation are made from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TORCHRUN = "torchrun's options"
SPARES = "Spares and recovery"
LOGS = "Output and logs"
RUN = "This run"
INERT = "torchrun's options that mean nothing on one machine (accepted, said once)"
REFUSED = "torchrun's options that are not supported yet (refused)"
PANELS = (TORCHRUN, SPARES, LOGS, RUN, INERT, REFUSED)


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


_TORCHRUN = (
    Option(
        name="nproc_per_node",
        panel=TORCHRUN,
        metavar="N",
        default="1",
        help="Ranks to train with: a number, `gpu` (one for each GPU), `cpu` (one for each CPU) or `auto` (GPUs if there are any, else CPUs).",
    ),
    Option(
        name="nnodes",
        panel=TORCHRUN,
        metavar="N",
        default="1:1",
        help="Machines. Only 1 for now.",
    ),
    Option(
        name="standalone",
        panel=TORCHRUN,
        metavar=None,
        help="One machine, no rendezvous: what happens anyway. The rendezvous options are then not looked at.",
    ),
    Option(
        name="max_restarts",
        panel=TORCHRUN,
        metavar="N",
        help="Restarts of the whole world, where a loss cannot be repaired in place. Not set: 3 while a script that calls deadpool_run.init() sets up, 0 for any other script, as torchrun.",
    ),
    Option(
        name="role", panel=TORCHRUN, metavar="NAME", default="default", help="ROLE_NAME and the prefix of log lines."
    ),
    Option(
        name="module",
        short="-m",
        panel=TORCHRUN,
        metavar=None,
        help="SCRIPT is the name of a module, as in `python -m`.",
    ),
    Option(
        name="no_python",
        panel=TORCHRUN,
        metavar=None,
        help="SCRIPT is a program to execute as it is; spares only wait for their rank.",
    ),
    Option(
        name="run_path",
        panel=TORCHRUN,
        metavar=None,
        help="Run SCRIPT by its absolute path with runpy.",
    ),
    Option(
        name="start_method",
        panel=TORCHRUN,
        metavar="nursery|spawn",
        default="nursery",
        help="nursery: one process imports torch once and forks every worker. spawn: a new interpreter for each. torchrun's `fork` and `forkserver` mean nursery.",
    ),
    Option(
        name="shutdown_timeout",
        panel=TORCHRUN,
        metavar="SECONDS",
        default="30",
        also_read=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
        help="From SIGTERM to SIGKILL. TORCH_ELASTIC_SHUTDOWN_TIMEOUT is read too.",
    ),
    Option(
        name="signals_to_handle",
        panel=TORCHRUN,
        metavar="NAMES",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="Signals that end the job in order: each is passed on to every worker.",
    ),
    Option(
        name="virtual_local_rank",
        panel=TORCHRUN,
        metavar=None,
        help="LOCAL_RANK=0 for every rank, each of which sees its own GPU alone.",
    ),
)

_SPARES = (
    Option(
        name="spares",
        panel=SPARES,
        metavar="N",
        default="0",
        torchrun=False,
        help="Workers held ready beyond the ranks; one takes the place of a rank that dies.",
    ),
    Option(
        name="repair_timeout",
        panel=SPARES,
        metavar="SECONDS",
        default="60",
        torchrun=False,
        help="A member that makes no progress within a repair for so long is ended and replaced.",
    ),
    Option(
        name="hang_timeout",
        panel=SPARES,
        metavar="SECONDS",
        default="600",
        torchrun=False,
        help="If no rank makes progress in its loop for so long, the rank that the others wait for is ended and replaced. It must be longer than anything that one rank does alone, such as an evaluation. 0: hangs are not looked for.",
    ),
    Option(
        name="capture_interval",
        panel=SPARES,
        metavar="STEPS",
        default="1",
        torchrun=False,
        help="Steps between two snapshots in memory, and so the most that a loss repeats. Doubled while captures do not keep up.",
    ),
    Option(
        name="preload",
        panel=SPARES,
        metavar="MODULES",
        torchrun=False,
        help="Modules, separated by commas, that the nursery imports once for all workers, besides torch.",
    ),
)

_LOGS = (
    Option(
        name="log_dir",
        panel=LOGS,
        metavar="DIR",
        help="Where torchrun's tree of log and error files goes. Not set: the run directory. /dev/null: no files.",
    ),
    Option(
        name="redirects",
        short="-r",
        panel=LOGS,
        metavar="STREAMS",
        default="0",
        help="Streams that go to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; or for each local rank, `0:3,1:2`.",
    ),
    Option(
        name="tee",
        short="-t",
        panel=LOGS,
        metavar="STREAMS",
        default="0",
        help="Streams that go to files and to the console; written as for --redirects.",
    ),
    Option(
        name="local_ranks_filter",
        panel=LOGS,
        metavar="RANKS",
        help="Local ranks, separated by commas, whose output is shown on the console. Not set: all. Files are not affected.",
    ),
    Option(
        name="duplicate_stdout_filters",
        panel=LOGS,
        metavar="TEXTS",
        help="Tee'd lines of stdout with one of these texts, separated by commas (`,,` is a comma), also go to filtered_stdout.log.",
    ),
    Option(name="duplicate_stderr_filters", panel=LOGS, metavar="TEXTS", help="The same for stderr."),
    Option(
        name="color",
        panel=LOGS,
        metavar="auto|always|never",
        default="auto",
        torchrun=False,
        help="Colour of our own messages. NO_COLOR and FORCE_COLOR are read too.",
    ),
)

_RUN = (
    Option(
        name="run_id",
        panel=RUN,
        metavar="NAME",
        torchrun=False,
        help="Name of this run. Not set: --rdzv-id, else the time and a few random letters.",
    ),
    Option(
        name="run_dir",
        panel=RUN,
        metavar="DIR",
        torchrun=False,
        help="Directory of this run's control socket and records. Not set: $XDG_STATE_HOME/deadpool-run/NAME, by default below ~/.local/state.",
    ),
    Option(
        name="config",
        panel=RUN,
        metavar="FILE",
        torchrun=False,
        in_file=False,
        help="YAML file of options. Not set: ./deadpool.yaml, else $XDG_CONFIG_HOME/deadpool/config.yaml, if there is one.",
    ),
    Option(
        name="no_config", panel=RUN, metavar=None, torchrun=False, in_file=False, help="Read no configuration file."
    ),
    Option(
        name="no_slurm",
        panel=RUN,
        metavar=None,
        torchrun=False,
        help="Do not look at Slurm's variables: neither start agents on the nodes of a job, nor take their number from it.",
    ),
    Option(
        name="dry_run",
        panel=RUN,
        metavar=None,
        torchrun=False,
        in_file=False,
        help="Print what would be started, and each setting with where it comes from; start nothing.",
    ),
)

_INERT = (
    Option(name="rdzv_backend", panel=INERT, metavar="NAME", default="static", help="There is nobody to meet."),
    Option(
        name="rdzv_endpoint",
        panel=INERT,
        metavar="HOST[:PORT]",
        help="There is nobody to meet. A host other than this one is refused.",
    ),
    Option(
        name="rdzv_id", panel=INERT, metavar="NAME", default="none", help="Counts as --run-id where that is not given."
    ),
    Option(name="rdzv_conf", panel=INERT, metavar="K=V,...", help="There is nobody to meet."),
    Option(
        name="master_addr",
        panel=INERT,
        metavar="HOST",
        help="The job's store listens on this machine; workers are told where.",
    ),
    Option(name="master_port", panel=INERT, metavar="PORT", help="A free port is chosen; workers are told which."),
    Option(name="local_addr", panel=INERT, metavar="HOST", help="Nobody else needs this machine's address."),
    Option(
        name="node_rank",
        panel=INERT,
        metavar="N",
        default="0",
        help="This is the only machine. Other than 0 is refused.",
    ),
    Option(
        name="monitor_interval",
        panel=INERT,
        metavar="SECONDS",
        help="A death is told by the kernel, not found by polling.",
    ),
)

_REFUSED = (
    Option(
        name="event_log_handler",
        panel=REFUSED,
        metavar="NAME",
        default="null",
        help="Only null.",
    ),
    Option(name="logs_specs", panel=REFUSED, metavar="NAME", env=False, help="Only the built-in one."),
    Option(
        name="numa_binding", panel=REFUSED, metavar="MODE", env=False, help="Bind the script yourself, with numactl."
    ),
)

OPTIONS = (*_TORCHRUN, *_SPARES, *_LOGS, *_RUN, *_INERT, *_REFUSED)
BY_NAME: Mapping[str, Option] = MappingProxyType({option.name: option for option in OPTIONS})
BY_SHORT: Mapping[str, Option] = MappingProxyType({option.short: option for option in OPTIONS if option.short})
