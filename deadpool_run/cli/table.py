"""Every option of `deadpool-run SCRIPT`, as data: parsing, help, `config show` and the documentation are made from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TORCHRUN = "torchrun's options"
SPARES = "Spares and recovery"
DURABLE = "Durable checkpoints"
LOGS = "Output and logs"
RUN = "This run"
NODES = "Several machines"
INERT = "torchrun's options that mean nothing here (accepted, said once)"
REFUSED = "torchrun's options that are not supported yet (refused)"
PANELS = (TORCHRUN, SPARES, NODES, DURABLE, LOGS, RUN, INERT, REFUSED)


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
        help="Machines that this command is started on, the spare ones included. All need the same --rdzv-endpoint.",
    ),
    Option(
        name="standalone",
        panel=TORCHRUN,
        metavar=None,
        help="One machine, no rendezvous. The options for several machines are then not looked at.",
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
        help="Held ready beyond the ranks, to take the place of what dies: workers on one machine, whole machines where there are several. `2w` (workers), `1n` (machines) or `1n,2w` say it outright.",
    ),
    Option(
        name="spare_mode",
        panel=SPARES,
        metavar="warm|hot",
        default="warm",
        torchrun=False,
        help="warm: a spare has imported torch and what --preload names. hot: it has also rehearsed the script as one rank of its machine, so that its model is built and its code compiled; for another rank it rehearses again.",
    ),
    Option(
        name="drain_timeout",
        panel=SPARES,
        metavar="SECONDS",
        default="30",
        torchrun=False,
        help="When a peer is lost, a rank whose step does not run to its end within so long runs its script again from the top, in the same process.",
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

_NODES = (
    Option(
        name="rdzv_endpoint",
        panel=NODES,
        metavar="HOST:PORT",
        help="Where the first machine listens for the others: an address of it, the same on all. Several, separated by commas, are tried in turn. The default port is 29400. Or a folder on a disk that all share, as an absolute path: whoever comes first listens, and says there where.",
    ),
    Option(
        name="node_rank",
        panel=NODES,
        metavar="N",
        help="This machine's place among those that hold ranks. Not set: in order of arrival.",
    ),
    Option(
        name="node_timeout",
        panel=NODES,
        metavar="SECONDS",
        default="5",
        torchrun=False,
        help="A machine that is silent for so long is lost. One whose connections are closed is lost at once.",
    ),
    Option(
        name="join_timeout",
        panel=NODES,
        metavar="SECONDS",
        default="600",
        torchrun=False,
        help="Too few machines for the ranks are waited for so long, at the start and after a loss.",
    ),
    Option(
        name="replicas",
        panel=NODES,
        metavar="N",
        default="1",
        torchrun=False,
        help="Copies of each rank's snapshot on other machines: so many may be lost at once.",
    ),
    Option(
        name="replica_bandwidth",
        panel=NODES,
        metavar="BYTES",
        torchrun=False,
        help="The most that a machine's copies take per second, such as 500M or 2G. Not set: all there is.",
    ),
    Option(
        name="replica_streams",
        panel=NODES,
        metavar="N",
        torchrun=False,
        help="Connections that one rank's large snapshots are sent over. Not set: so many that the machine's ranks have 4 in all.",
    ),
    Option(
        name="topology",
        panel=NODES,
        metavar="LABEL",
        torchrun=False,
        help="What this machine shares with its neighbours, such as a switch. Copies go to machines with another label, spares are taken from the same one first.",
    ),
    Option(
        name="node_name",
        panel=NODES,
        metavar="NAME",
        torchrun=False,
        help="What this machine is called. Not set: its host name.",
    ),
    Option(
        name="token_file",
        panel=NODES,
        metavar="FILE",
        torchrun=False,
        help="A secret that all machines of the job have; who has it can join. Not set: DEADPOOL_TOKEN, else a file of your own below ~/.local/state, made when it is first needed.",
    ),
)

_DURABLE = (
    Option(
        name="durable",
        panel=DURABLE,
        metavar="DIR|URL",
        torchrun=False,
        help="Where snapshots are also written to, as torch.distributed.checkpoint does; URLs need `deadpool-run[fsspec]`. Not set: they are in memory only.",
    ),
    Option(
        name="durable_every",
        panel=DURABLE,
        metavar="N|MINUTES",
        default="10m",
        torchrun=False,
        help="How often: after so many steps (`100`) or minutes (`10m`), the newest snapshot that all ranks have. One more is written at the end of the job.",
    ),
    Option(
        name="durable_keep",
        panel=DURABLE,
        metavar="N",
        default="2",
        torchrun=False,
        help="How many of the newest checkpoints are kept.",
    ),
    Option(
        name="durable_timeout",
        panel=DURABLE,
        metavar="SECONDS",
        default="1800",
        torchrun=False,
        help="How long a machine may take to write a checkpoint (of several machines, each step of it), or to read one, before it is given up: storage that is gone may never answer.",
    ),
    Option(
        name="resume",
        panel=DURABLE,
        metavar="auto|never|PATH",
        default="auto",
        torchrun=False,
        help="auto: go on from the newest checkpoint in --durable that is whole, if there is any. never: begin at step 0, and refuse a place that holds checkpoints. Else this checkpoint, or the job does not begin.",
    ),
    Option(
        name="on_usr1",
        panel=DURABLE,
        metavar="exit|save",
        default="exit",
        torchrun=False,
        help="With --durable, SIGUSR1 has a checkpoint written at once. exit: then the job ends with code 75, to be queued again. save: training goes on.",
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
        name="simulate_nodes",
        panel=RUN,
        metavar="N",
        torchrun=False,
        in_file=False,
        help="With --dry-run: as if so many machines had come.",
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
    Option(
        name="rdzv_backend",
        panel=INERT,
        metavar="NAME",
        default="static",
        help="There is one way to meet: --rdzv-endpoint.",
    ),
    Option(
        name="rdzv_id", panel=INERT, metavar="NAME", default="none", help="Counts as --run-id where that is not given."
    ),
    Option(name="rdzv_conf", panel=INERT, metavar="K=V,...", help="See --join-timeout and --node-timeout."),
    Option(
        name="master_addr",
        panel=INERT,
        metavar="HOST",
        help="With --nnodes, and without --rdzv-endpoint, the first machine's address. The job's store is another matter: workers are told where it listens.",
    ),
    Option(
        name="master_port", panel=INERT, metavar="PORT", help="Likewise the port that the first machine listens on."
    ),
    Option(name="local_addr", panel=INERT, metavar="HOST", help="The address that reaches --rdzv-endpoint is taken."),
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

OPTIONS = (*_TORCHRUN, *_SPARES, *_NODES, *_DURABLE, *_LOGS, *_RUN, *_INERT, *_REFUSED)
BY_NAME: Mapping[str, Option] = MappingProxyType({option.name: option for option in OPTIONS})
BY_SHORT: Mapping[str, Option] = MappingProxyType({option.short: option for option in OPTIONS if option.short})
