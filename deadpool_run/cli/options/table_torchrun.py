"""The part of the table of options that torchrun has too."""

from deadpool_run.cli.options.option import INERT, LOGS, TORCHRUN, Option, group

TORCHRUN_OPTIONS = group(
    TORCHRUN,
    Option(
        "nproc_per_node",
        "N",
        "Ranks on each machine: a number, `gpu` (one per GPU), `cpu` (one per CPU that the process may use) or `auto` (`gpu` if there are GPUs, else `cpu`).",
        default="1",
    ),
    Option(
        "nnodes",
        "N",
        "Machines on which this command is started, spare machines included. All need the same --rdzv-endpoint.",
        default="1:1",
    ),
    Option("standalone", None, "Use one machine without a rendezvous, and ignore the options for several machines."),
    Option(
        "max_restarts",
        "N",
        "Restarts of the whole world when a loss cannot be repaired in place. Default: 3 for a script that calls deadpool_run.init(), 0 for any other, as in torchrun.",
    ),
    Option("role", "NAME", "Value of ROLE_NAME, and the prefix of log lines.", default="default"),
    Option("module", None, "SCRIPT is the name of a module, as in `python -m`.", short="-m"),
    Option("no_python", None, "SCRIPT is a program to execute as it is. Spares start it only when they get a rank."),
    Option("run_path", None, "Run SCRIPT by its absolute path with runpy."),
    Option(
        "start_method",
        "forkserver|spawn",
        "forkserver: one process imports torch once and forks every worker. spawn: each worker is a new interpreter. fork means forkserver.",
        default="forkserver",
    ),
    Option(
        "shutdown_timeout",
        "TIME",
        "Time from SIGTERM to SIGKILL for workers, and for background processes that they leave at the end. TORCH_ELASTIC_SHUTDOWN_TIMEOUT sets it, too.",
        default="30s",
        also_read=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    Option(
        "signals_to_handle",
        "NAMES",
        "Signals that end the job in order: each is passed on to every worker. Under nohup SIGHUP has no effect.",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Option(
        "numa_binding",
        "node|socket|exclusive|core-complex",
        "Bind each rank to CPUs near its GPU: those of the NUMA node, those of the socket, a share of the node's cores, or a last-level cache.",
        env=False,
    ),
    Option("virtual_local_rank", None, "Set LOCAL_RANK=0 for every rank; each rank sees only its own GPU."),
    torchrun=True,
)

LOGS_OPTIONS = group(
    LOGS,
    Option(
        "log_dir",
        "DIR",
        "Directory for log and error files, laid out as torchrun's. Default: the run directory. /dev/null: no files.",
    ),
    Option(
        "redirects",
        "STREAMS",
        "Streams to write to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; or for each local rank, `0:3,1:2`.",
        default="0",
        short="-r",
    ),
    Option(
        "tee",
        "STREAMS",
        "Streams to write to files and to the console, in the form of --redirects.",
        default="0",
        short="-t",
    ),
    Option(
        "log_line_prefix_template",
        "TEMPLATE",
        "Prefix of tee'd lines on the console, with ${role_name}, ${local_rank}, ${rank} and ${hostname}. "
        "Default: that of TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, or [${role_name}${local_rank}]:",
    ),
    Option(
        "local_ranks_filter",
        "RANKS",
        "Local ranks, separated by commas, whose output is shown on the console. Default: all. Files are not affected.",
    ),
    Option(
        "duplicate_stdout_filters",
        "TEXTS",
        "Also write lines of tee'd stdout that contain one of these texts to filtered_stdout.log. Separate texts by commas; `,,` is a comma.",
    ),
    Option("duplicate_stderr_filters", "TEXTS", "The same for stderr and filtered_stderr.log."),
    torchrun=True,
)

INERT_OPTIONS = group(
    INERT,
    Option("rdzv_backend", "NAME", "No effect: machines always meet at --rdzv-endpoint.", default="static"),
    Option("rdzv_id", "NAME", "Used as --run-id if that is not set.", default="none"),
    Option(
        "rdzv_conf",
        "K=V,...",
        "join_timeout is used as --join-timeout if that is not set. For the others, see --node-timeout.",
    ),
    Option(
        "master_addr",
        "HOST",
        "With --nnodes and without --rdzv-endpoint: address of the first machine. Workers get the store's address separately.",
    ),
    Option(
        "master_port",
        "PORT",
        "With --nnodes and without --rdzv-endpoint: port on which the first machine listens. Default: 29500.",
    ),
    Option("local_addr", "HOST", "No effect: a machine is known by the address from which it reaches --rdzv-endpoint."),
    Option("monitor_interval", "TIME", "No effect: the kernel reports a death at once, nothing is polled."),
    Option(
        "event_log_handler",
        "NAME",
        "null, console or dynamic_rendezvous; no effect. Events are in the run directory's journal and in `status --json`.",
        default="null",
    ),
    Option(
        "logs_specs",
        "NAME",
        "Name of an installed plugin for logs; no effect, because log files are always laid out as torchrun's.",
        env=False,
    ),
    Option(
        "use_env",
        None,
        "For torch.distributed.launch; no effect, because workers always get their rank from the environment.",
        env=False,
    ),
    torchrun=True,
)
