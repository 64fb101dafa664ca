"""The table of options: the source of parsing, help, `config show` and documentation."""

from collections.abc import Mapping
from types import MappingProxyType

from deadpool_run.cli.options.option import DURABLE, LOGS, NODES, RUN, SPARES, Option, group
from deadpool_run.cli.options.table_torchrun import INERT_OPTIONS, LOGS_OPTIONS, TORCHRUN_OPTIONS

_SPARES = group(
    SPARES,
    Option(
        "spares",
        "N",
        "Spares to keep ready: processes on one machine, whole machines with --nnodes. `2w` always means processes and `1n` machines; `1n,2w` sets both.",
        default="0",
    ),
    Option(
        "spare_mode",
        "warm|hot",
        "warm: spares have imported torch and the --preload modules. hot: spares have also rehearsed the script as one rank, so their model is built and compiled. On a spare machine, that is a rank of another machine.",
        default="warm",
    ),
    Option(
        "abort_timeout",
        "TIME",
        "How long a surviving rank may take to finish its interrupted step after a loss. After that it runs its script again from the top, in the same process.",
        default="30s",
    ),
    Option(
        "repair_timeout",
        "TIME",
        "How long a rank may make no progress during a repair. After that the agent kills and replaces it.",
        default="60s",
    ),
    Option(
        "hang_timeout",
        "TIME",
        "If no rank makes progress for this long, kill and replace the rank that the others wait for. Set it longer than anything that one rank does alone, such as an evaluation. 0 disables it.",
        default="10m",
    ),
    Option(
        "capture_interval",
        "STEPS",
        "Steps between two snapshots in memory. A loss repeats up to that many steps, or less than twice as many if copies to other machines are late. Doubled while snapshots do not keep up.",
        default="1",
    ),
    Option(
        "snapshot_memory",
        "SIZE",
        "Limit on the memory of a machine's snapshots and copies, such as 8GiB. Without room, snapshots are skipped and copies go to other machines. Default: the free memory.",
    ),
    Option(
        "preload",
        "MODULES",
        "Modules, separated by commas, that the fork server imports once for all workers, in addition to torch.",
    ),
    Option(
        "chaos",
        "PLAN",
        'Chaos run: inject faults, and print a verdict at the end. PLAN is a YAML file, or words such as "kill every 60s".',
    ),
    torchrun=False,
)

_NODES = (
    *group(
        NODES,
        Option(
            "rdzv_endpoint",
            "HOST:PORT",
            "Address and port on which the first machine listens, the same on all machines (default port 29400). Separate several by commas. Or the absolute path of a shared folder: the first machine to arrive writes its address there.",
        ),
        Option("node_rank", "N", "Position of this machine among those that hold ranks. Default: order of arrival."),
        torchrun=True,
    ),
    *group(
        NODES,
        Option(
            "node_timeout",
            "TIME",
            "How long a machine may be silent before it counts as lost. It stops its workers a little earlier.",
            default="5s",
        ),
        Option(
            "join_timeout",
            "TIME",
            "How long to wait for enough machines, at the start and after a loss.",
            default="10m",
        ),
        Option(
            "replicas",
            "N",
            "Copies of each rank's snapshots on other machines. This many machines may be lost at once.",
            default="1",
        ),
        Option(
            "redundancy",
            "KIND",
            "`copies` of each rank's snapshots on other machines, or `xor:K`: one parity for K ranks of different machines, in about 1/K of the memory. With it, only one machine may be lost at once.",
            default="copies",
        ),
        Option(
            "replica_bandwidth",
            "BYTES",
            "Limit on the bytes per second that a machine's copies use, such as 500M or 2G. Default: no limit.",
        ),
        Option(
            "replica_streams",
            "N",
            "Connections over which one rank's large snapshots are sent. Default: 4 in all for the ranks of a machine.",
        ),
        Option(
            "topology",
            "LABEL",
            "Label of this machine's failure domain, such as its switch. Copies go to machines with another label; spares come from the same label first.",
        ),
        Option(
            "authority",
            "PLACE",
            "Place that records the leader of the run, and chooses one of two machines if they lose each other: agents, file:/DIR on a disk that all machines share, etcd://HOST:PORT or k8s:[NAMESPACE/]NAME. Default: agents, or the folder in which the agents of a Slurm step share a token.",
        ),
        Option("node_name", "NAME", "Name of this machine. Default: its host name."),
        Option(
            "token_file",
            "FILE",
            "File with the job's secret, the same on all machines; anyone who has it can join. Default: DEADPOOL_TOKEN, else a file below ~/.local/state, created when it is first needed.",
        ),
        torchrun=False,
    ),
)

_DURABLE = group(
    DURABLE,
    Option(
        "durable",
        "DIR|URL",
        "Directory or URL for checkpoints on disk, in the format of torch.distributed.checkpoint. URLs need `deadpool-run[fsspec]`. Default: snapshots stay in memory only.",
    ),
    Option(
        "durable_every",
        "N|TIME",
        "Steps (`100`) or time (`10m`) between two checkpoints. One more is written at the end of the job.",
        default="10m",
    ),
    Option("durable_keep", "N", "Number of checkpoints to keep; older ones are removed.", default="2"),
    Option(
        "durable_timeout",
        "TIME",
        "How long a machine may take to read a checkpoint, or to write one (with several machines: each step of writing). After that it gives up, because lost storage may never answer.",
        default="30m",
    ),
    Option(
        "resume",
        "auto|never|PATH",
        "auto: start from the newest complete checkpoint in --durable, if there is one. never: start at step 0, and refuse a place that holds checkpoints. PATH: start from this checkpoint or fail.",
        default="auto",
    ),
    Option(
        "on_usr1",
        "exit|save",
        "With --durable, SIGUSR1 writes a checkpoint at once. exit: the job then ends with code 75, to be queued again. save: training continues.",
        default="exit",
    ),
    torchrun=False,
)

_LOGS = group(
    LOGS,
    Option(
        "color",
        "auto|always|never",
        "Colour of deadpool-run's own messages. auto respects NO_COLOR and FORCE_COLOR.",
        default="auto",
    ),
    Option(
        "log_format",
        "text|json",
        "Form of deadpool-run's own lines on stderr. json: an object on each line. Output of workers stays as it is.",
        default="text",
    ),
    Option(
        "metrics_port",
        "[HOST:]PORT",
        "Serve metrics for Prometheus at http://HOST:PORT/metrics, on the leader's machine. Needs `deadpool-run[metrics]`. HOST is 127.0.0.1 unless set. Default: no metrics.",
    ),
    Option(
        "on_repair",
        "COMMAND",
        "Program with arguments to run after each repair, without a shell. Variables DEADPOOL_INCIDENT_... describe the repair. It may take 60 s; the job does not wait.",
    ),
    Option(
        "verbose", None, "Print every decision, and the milliseconds of each phase of a repair. `status` has them too."
    ),
    torchrun=False,
)

_RUN = group(
    RUN,
    Option("run_id", "NAME", "Name of this run. Default: --rdzv-id, else the time and four random characters."),
    Option(
        "run_dir",
        "DIR",
        "Directory for this run's control socket and records. Default: a directory named after the run in $XDG_STATE_HOME/deadpool-run, by default below ~/.local/state.",
    ),
    Option(
        "keep_runs",
        "N",
        "Number of ended runs to keep in the default place. The start of a run removes the directories of older ones, with their logs. Default: all. No effect with --run-dir.",
    ),
    Option(
        "config",
        "FILE",
        "YAML file of options. Default: ./deadpool.yaml, else $XDG_CONFIG_HOME/deadpool/config.yaml, if there is one.",
        in_file=False,
    ),
    Option("no_config", None, "Read no configuration file.", in_file=False),
    Option("simulate_nodes", "N", "With --dry-run: the number of machines to assume.", in_file=False),
    Option(
        "simulate_parameters",
        "COUNT",
        "With --dry-run: the number of the model's parameters, such as 7B, to see whether its snapshots and copies fit into memory.",
        in_file=False,
    ),
    Option(
        "no_slurm",
        None,
        "Ignore Slurm's variables: don't start agents on the nodes of a job, and don't take the number of nodes from Slurm.",
    ),
    Option(
        "dry_run",
        None,
        "Start nothing; print the ranks of each machine, and each setting with its source.",
        in_file=False,
    ),
    torchrun=False,
)

OPTIONS = (*TORCHRUN_OPTIONS, *_SPARES, *_NODES, *_DURABLE, *LOGS_OPTIONS, *_LOGS, *_RUN, *INERT_OPTIONS)
BY_NAME: Mapping[str, Option] = MappingProxyType({option.name: option for option in OPTIONS})
BY_SHORT: Mapping[str, Option] = MappingProxyType({option.short: option for option in OPTIONS if option.short})
