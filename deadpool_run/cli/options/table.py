"""Every option of `deadpool-run SCRIPT`, as data: parsing, help, `config show` and the documentation are made from it."""

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
        help="Steps between two snapshots in memory, and so the most that a loss repeats (less than twice as many if copies to other machines are late). Doubled while captures do not keep up.",
    ),
    Option(
        name="preload",
        panel=SPARES,
        metavar="MODULES",
        torchrun=False,
        help="Modules, separated by commas, that the fork server imports once for all workers, besides torch.",
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
    *LOGS_OPTIONS,
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

OPTIONS = (*TORCHRUN_OPTIONS, *_SPARES, *_NODES, *_DURABLE, *_LOGS, *_RUN, *INERT_OPTIONS)
BY_NAME: Mapping[str, Option] = MappingProxyType({option.name: option for option in OPTIONS})
BY_SHORT: Mapping[str, Option] = MappingProxyType({option.short: option for option in OPTIONS if option.short})
