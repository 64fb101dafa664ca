"""The table of options: the source of parsing, help, `config show` and documentation."""

from collections.abc import Mapping
from types import MappingProxyType

from deadpool_run.cli.options.option import DURABLE, LOGS, NODES, RUN, SPARES, Option
from deadpool_run.cli.options.table_torchrun import INERT_OPTIONS, LOGS_OPTIONS, TORCHRUN_OPTIONS

_SPARES = (
    Option(
        name="spares",
        panel=SPARES,
        metavar="N",
        default="0",
        torchrun=False,
        help="Spares to keep ready: processes on one machine, whole machines with --nnodes. `2w` always means processes and `1n` machines; `1n,2w` sets both.",
    ),
    Option(
        name="spare_mode",
        panel=SPARES,
        metavar="warm|hot",
        default="warm",
        torchrun=False,
        help="warm: spares have imported torch and the --preload modules. hot: spares have also rehearsed the script as one rank of their machine, so their model is built and compiled.",
    ),
    Option(
        name="drain_timeout",
        panel=SPARES,
        metavar="SECONDS",
        default="30",
        torchrun=False,
        help="How long a surviving rank may take to finish its interrupted step after a loss. After that it runs its script again from the top, in the same process.",
    ),
    Option(
        name="repair_timeout",
        panel=SPARES,
        metavar="SECONDS",
        default="60",
        torchrun=False,
        help="How long a rank may make no progress during a repair. After that the agent kills and replaces it.",
    ),
    Option(
        name="hang_timeout",
        panel=SPARES,
        metavar="SECONDS",
        default="600",
        torchrun=False,
        help="If no rank makes progress for this long, kill and replace the rank that the others wait for. Set it longer than anything that one rank does alone, such as an evaluation. 0 disables it.",
    ),
    Option(
        name="capture_interval",
        panel=SPARES,
        metavar="STEPS",
        default="1",
        torchrun=False,
        help="Steps between two snapshots in memory, and so the most that a loss repeats (less than twice as many if copies to other machines are late). Doubled while snapshots do not keep up.",
    ),
    Option(
        name="preload",
        panel=SPARES,
        metavar="MODULES",
        torchrun=False,
        help="Modules, separated by commas, that the fork server imports once for all workers, in addition to torch.",
    ),
)

_NODES = (
    Option(
        name="rdzv_endpoint",
        panel=NODES,
        metavar="HOST:PORT",
        help="Address and port on which the first machine listens, the same on all machines (default port 29400). Separate several by commas. Or the absolute path of a shared folder: the first machine to arrive writes its address there.",
    ),
    Option(
        name="node_rank",
        panel=NODES,
        metavar="N",
        help="Position of this machine among those that hold ranks. Default: order of arrival.",
    ),
    Option(
        name="node_timeout",
        panel=NODES,
        metavar="SECONDS",
        default="5",
        torchrun=False,
        help="How long a machine may be silent before it counts as lost. A machine whose connections are closed is lost at once.",
    ),
    Option(
        name="join_timeout",
        panel=NODES,
        metavar="SECONDS",
        default="600",
        torchrun=False,
        help="How long to wait for enough machines, at the start and after a loss.",
    ),
    Option(
        name="replicas",
        panel=NODES,
        metavar="N",
        default="1",
        torchrun=False,
        help="Copies of each rank's snapshots on other machines: the number of machines that may be lost at once.",
    ),
    Option(
        name="replica_bandwidth",
        panel=NODES,
        metavar="BYTES",
        torchrun=False,
        help="Limit on the bytes per second that a machine's copies use, such as 500M or 2G. Default: no limit.",
    ),
    Option(
        name="replica_streams",
        panel=NODES,
        metavar="N",
        torchrun=False,
        help="Connections over which one rank's large snapshots are sent. Default: 4 in all for the ranks of a machine.",
    ),
    Option(
        name="topology",
        panel=NODES,
        metavar="LABEL",
        torchrun=False,
        help="Label of this machine's failure domain, such as its switch. Copies go to machines with another label; spares come from the same label first.",
    ),
    Option(
        name="node_name",
        panel=NODES,
        metavar="NAME",
        torchrun=False,
        help="Name of this machine. Default: its host name.",
    ),
    Option(
        name="token_file",
        panel=NODES,
        metavar="FILE",
        torchrun=False,
        help="File with the job's secret, the same on all machines; anyone who has it can join. Default: DEADPOOL_TOKEN, else a file below ~/.local/state, created when it is first needed.",
    ),
)

_DURABLE = (
    Option(
        name="durable",
        panel=DURABLE,
        metavar="DIR|URL",
        torchrun=False,
        help="Directory or URL for checkpoints on disk, in the format of torch.distributed.checkpoint. URLs need `deadpool-run[fsspec]`. Default: snapshots stay in memory only.",
    ),
    Option(
        name="durable_every",
        panel=DURABLE,
        metavar="N|MINUTES",
        default="10m",
        torchrun=False,
        help="Steps (`100`) or minutes (`10m`) between two checkpoints. One more is written at the end of the job.",
    ),
    Option(
        name="durable_keep",
        panel=DURABLE,
        metavar="N",
        default="2",
        torchrun=False,
        help="Number of checkpoints to keep; older ones are removed.",
    ),
    Option(
        name="durable_timeout",
        panel=DURABLE,
        metavar="SECONDS",
        default="1800",
        torchrun=False,
        help="How long a machine may take to read a checkpoint, or to write one (with several machines: each step of writing). After that it gives up, because lost storage may never answer.",
    ),
    Option(
        name="resume",
        panel=DURABLE,
        metavar="auto|never|PATH",
        default="auto",
        torchrun=False,
        help="auto: start from the newest complete checkpoint in --durable, if there is one. never: start at step 0, and refuse a place that holds checkpoints. PATH: start from this checkpoint or fail.",
    ),
    Option(
        name="on_usr1",
        panel=DURABLE,
        metavar="exit|save",
        default="exit",
        torchrun=False,
        help="With --durable, SIGUSR1 writes a checkpoint at once. exit: the job then ends with code 75, to be queued again. save: training continues.",
    ),
)

_LOGS = (
    *LOGS_OPTIONS,
    Option(
        name="color",
        panel=LOGS,
        metavar="auto|always|never",
        default="auto",
        torchrun=False,
        help="Colour of deadpool-run's own messages. auto respects NO_COLOR and FORCE_COLOR.",
    ),
)

_RUN = (
    Option(
        name="run_id",
        panel=RUN,
        metavar="NAME",
        torchrun=False,
        help="Name of this run. Default: --rdzv-id, else the time and four random characters.",
    ),
    Option(
        name="run_dir",
        panel=RUN,
        metavar="DIR",
        torchrun=False,
        help="Directory for this run's control socket and records. Default: a directory named after the run in $XDG_STATE_HOME/deadpool-run, by default below ~/.local/state.",
    ),
    Option(
        name="config",
        panel=RUN,
        metavar="FILE",
        torchrun=False,
        in_file=False,
        help="YAML file of options. Default: ./deadpool.yaml, else $XDG_CONFIG_HOME/deadpool/config.yaml, if there is one.",
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
        help="With --dry-run: the number of machines to assume.",
    ),
    Option(
        name="no_slurm",
        panel=RUN,
        metavar=None,
        torchrun=False,
        help="Ignore Slurm's variables: don't start agents on the nodes of a job, and don't take the number of nodes from Slurm.",
    ),
    Option(
        name="dry_run",
        panel=RUN,
        metavar=None,
        torchrun=False,
        in_file=False,
        help="Print what would be started, and each setting with its source; start nothing.",
    ),
)

OPTIONS = (*TORCHRUN_OPTIONS, *_SPARES, *_NODES, *_DURABLE, *_LOGS, *_RUN, *INERT_OPTIONS)
BY_NAME: Mapping[str, Option] = MappingProxyType({option.name: option for option in OPTIONS})
BY_SHORT: Mapping[str, Option] = MappingProxyType({option.short: option for option in OPTIONS if option.short})
