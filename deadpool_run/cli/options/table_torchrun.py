"""The options that torchrun has too, as data."""

from deadpool_run.cli.options.option import INERT, LOGS, TORCHRUN, Option

TORCHRUN_OPTIONS = (
    Option(
        name="nproc_per_node",
        panel=TORCHRUN,
        metavar="N",
        default="1",
        help="Ranks to train with: a number, `gpu` (one for each GPU), `cpu` (one for each CPU that it may use) or `auto` (GPUs if there are any, else CPUs).",
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
        name="numa_binding",
        panel=TORCHRUN,
        metavar="node|socket|exclusive|core-complex",
        env=False,
        help="Bind each rank to CPUs near its GPU: those of the NUMA node, of the socket, a share of the node's cores, or a last-level cache.",
    ),
    Option(
        name="virtual_local_rank",
        panel=TORCHRUN,
        metavar=None,
        help="LOCAL_RANK=0 for every rank, each of which sees its own GPU alone.",
    ),
)

LOGS_OPTIONS = (
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
)

INERT_OPTIONS = (
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
    Option(
        name="rdzv_conf",
        panel=INERT,
        metavar="K=V,...",
        help="join_timeout counts as --join-timeout where that is not given. See --node-timeout for the others.",
    ),
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
    Option(
        name="event_log_handler",
        panel=INERT,
        metavar="NAME",
        default="null",
        help="null, console or dynamic_rendezvous. What happens is in the run directory's journal, and `status --json` tells it.",
    ),
    Option(
        name="logs_specs",
        panel=INERT,
        metavar="NAME",
        env=False,
        help="An installed plugin for logs, which is not used: the tree of logs is always torchrun's own.",
    ),
    Option(
        name="use_env",
        panel=INERT,
        metavar=None,
        env=False,
        help="Of torch.distributed.launch: ranks are told their number by the environment, as always here.",
    ),
)
