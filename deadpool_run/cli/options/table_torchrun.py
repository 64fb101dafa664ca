"""The part of the table of options that torchrun has too."""

from deadpool_run.cli.options.option import INERT, LOGS, TORCHRUN, Option

TORCHRUN_OPTIONS = (
    Option(
        name="nproc_per_node",
        panel=TORCHRUN,
        metavar="N",
        default="1",
        help="Ranks on each machine: a number, `gpu` (one per GPU), `cpu` (one per CPU that the process may use) or `auto` (`gpu` if there are GPUs, else `cpu`).",
    ),
    Option(
        name="nnodes",
        panel=TORCHRUN,
        metavar="N",
        default="1:1",
        help="Machines on which this command is started, spare machines included. All need the same --rdzv-endpoint.",
    ),
    Option(
        name="standalone",
        panel=TORCHRUN,
        metavar=None,
        help="Use one machine without a rendezvous, and ignore the options for several machines.",
    ),
    Option(
        name="max_restarts",
        panel=TORCHRUN,
        metavar="N",
        help="Restarts of the whole world when a loss cannot be repaired in place. Default: 3 during the set-up of a script that calls deadpool_run.init(), 0 for any other script, as in torchrun.",
    ),
    Option(
        name="role",
        panel=TORCHRUN,
        metavar="NAME",
        default="default",
        help="Value of ROLE_NAME, and the prefix of log lines.",
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
        help="SCRIPT is a program to execute as it is. Spares start it only when they get a rank.",
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
        metavar="forkserver|spawn",
        default="forkserver",
        help="forkserver: one process imports torch once and forks every worker. spawn: each worker is a new interpreter. fork means forkserver.",
    ),
    Option(
        name="shutdown_timeout",
        panel=TORCHRUN,
        metavar="SECONDS",
        default="30",
        also_read=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
        help="How long workers may take to end after SIGTERM before SIGKILL. TORCH_ELASTIC_SHUTDOWN_TIMEOUT sets it too.",
    ),
    Option(
        name="signals_to_handle",
        panel=TORCHRUN,
        metavar="NAMES",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="Signals that end the job in order: each is passed on to every worker.",
    ),
    Option(
        name="numa_binding",
        panel=TORCHRUN,
        metavar="node|socket|exclusive|core-complex",
        env=False,
        help="Bind each rank to CPUs near its GPU: those of the NUMA node, those of the socket, a share of the node's cores, or a last-level cache.",
    ),
    Option(
        name="virtual_local_rank",
        panel=TORCHRUN,
        metavar=None,
        help="Set LOCAL_RANK=0 for every rank; each rank sees only its own GPU.",
    ),
)

LOGS_OPTIONS = (
    Option(
        name="log_dir",
        panel=LOGS,
        metavar="DIR",
        help="Directory for log and error files, laid out as torchrun's. Default: the run directory. /dev/null: no files.",
    ),
    Option(
        name="redirects",
        short="-r",
        panel=LOGS,
        metavar="STREAMS",
        default="0",
        help="Streams to write to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; or for each local rank, `0:3,1:2`.",
    ),
    Option(
        name="tee",
        short="-t",
        panel=LOGS,
        metavar="STREAMS",
        default="0",
        help="Streams to write to files and to the console, in the form of --redirects.",
    ),
    Option(
        name="local_ranks_filter",
        panel=LOGS,
        metavar="RANKS",
        help="Local ranks, separated by commas, whose output is shown on the console. Default: all. Files are not affected.",
    ),
    Option(
        name="duplicate_stdout_filters",
        panel=LOGS,
        metavar="TEXTS",
        help="Also write lines of tee'd stdout that contain one of these texts to filtered_stdout.log. Separate texts by commas; `,,` is a comma.",
    ),
    Option(
        name="duplicate_stderr_filters",
        panel=LOGS,
        metavar="TEXTS",
        help="The same for stderr and filtered_stderr.log.",
    ),
)

INERT_OPTIONS = (
    Option(
        name="rdzv_backend",
        panel=INERT,
        metavar="NAME",
        default="static",
        help="No effect: machines always meet at --rdzv-endpoint.",
    ),
    Option(name="rdzv_id", panel=INERT, metavar="NAME", default="none", help="Used as --run-id if that is not set."),
    Option(
        name="rdzv_conf",
        panel=INERT,
        metavar="K=V,...",
        help="join_timeout is used as --join-timeout if that is not set. For the others, see --node-timeout.",
    ),
    Option(
        name="master_addr",
        panel=INERT,
        metavar="HOST",
        help="With --nnodes and without --rdzv-endpoint: address of the first machine. Workers get the store's address separately.",
    ),
    Option(
        name="master_port",
        panel=INERT,
        metavar="PORT",
        help="With --nnodes and without --rdzv-endpoint: port on which the first machine listens.",
    ),
    Option(
        name="local_addr",
        panel=INERT,
        metavar="HOST",
        help="No effect: a machine is known by the address from which it reaches --rdzv-endpoint.",
    ),
    Option(
        name="monitor_interval",
        panel=INERT,
        metavar="SECONDS",
        help="No effect: the kernel reports a death at once, nothing is polled.",
    ),
    Option(
        name="event_log_handler",
        panel=INERT,
        metavar="NAME",
        default="null",
        help="null, console or dynamic_rendezvous; no effect. Events are in the run directory's journal and in `status --json`.",
    ),
    Option(
        name="logs_specs",
        panel=INERT,
        metavar="NAME",
        env=False,
        help="Name of an installed plugin for logs; no effect, because log files are always laid out as torchrun's.",
    ),
    Option(
        name="use_env",
        panel=INERT,
        metavar=None,
        env=False,
        help="For torch.distributed.launch; no effect, because workers always get their rank from the environment.",
    ),
)
