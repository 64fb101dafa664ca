"""The command lines that are run under both launchers, as data."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

CPUS = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command line. `{log}`, `{port}`, `{node}`, `{home}`, `{scripts}` and `{python}` stand for what differs from run to run."""

    name: str
    line: str
    """The arguments after `torchrun` and `deadpool-run`."""
    differs: frozenset[str] = frozenset()
    """Intended differences that it shows, by name, beside those that every case shows."""
    env: Mapping[str, str] = field(default_factory=dict)
    world: int = 2
    """Ranks that come up and meet."""
    agents: int = 1
    any_order: bool = False
    """Which agent gets which ranks is left to chance."""
    signal: str = ""
    """Sent to every launcher once all ranks are up."""
    module: str = "torch.distributed.run"
    since: tuple[int, int] = (2, 13)
    """The first torch whose torchrun has the option."""
    quick: bool = False
    """Also run by `make test`."""


def _case(name: str, line: str, *differs: str, **more: object) -> Case:
    return Case(name=name, line=line, differs=frozenset(differs), **more)


TWO = "--nproc-per-node 2"
LOGS = f"{TWO} --log-dir {{log}}"
STATIC = f"--nnodes 2 --node-rank {{node}} --master-addr 127.0.0.1 --master-port {{port}} {LOGS}"
C10D = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{{port}} --rdzv-id job {LOGS}"
OUTER = {"TORCHELASTIC_ERROR_FILE": "{home}/own.json"}
PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
USAGE, TEE, VARIABLES = "exit code 2", "tee without delay", "launcher's variables"

CASES = (
    # --- what is run ---
    _case("one rank", "probe.py a --b", world=1),
    _case("two ranks", f"{TWO} probe.py a --b"),
    _case("underscores", "--nproc_per_node 2 --max_restarts=1 probe.py --a_b"),
    _case("equals signs", "--nproc-per-node=2 --max-restarts=2 --role=r probe.py"),
    _case("options cut short", "--nproc-per 2 --max-r 3 probe.py"),
    _case("module", f"{TWO} -m probe a"),
    _case("module, long", f"{TWO} --module probe -m b"),
    _case("no python", f"{TWO} --no-python {{python}} -u probe.py a"),
    _case(
        "no python, a shell", f"{TWO} --no-python /bin/sh -c 'echo probe: $RANK $LOCAL_RANK $WORLD_SIZE'", quick=True
    ),
    _case("no python, a module", f"{TWO} -m --no-python probe", USAGE, world=0),
    _case("run path", f"{TWO} --run-path {{scripts}}/probe.py a", "run path"),
    _case("run path wins", f"{TWO} --run-path --no-python {{scripts}}/probe.py a", "run path"),
    _case("the script's own options", f"{TWO} probe.py --nproc-per-node 7 -r 3 --help -m"),
    _case("-- before the script", f"{TWO} -- probe.py a --nnodes 3"),
    _case("-- after the script", f"{TWO} probe.py -- a"),
    _case("-- among the arguments", f"{TWO} probe.py a -- b --"),
    _case(
        "${local_rank}",
        f"{TWO} probe.py '--local-rank=${{local_rank}}' '$local_rank' '${{rank}}' '$$5' 'a$'",
    ),
    _case("PYTHON_EXEC", f"{TWO} probe.py", env={"PYTHON_EXEC": "{python}"}),
    _case("start method spawn", f"{TWO} --start-method spawn probe.py"),
    _case("start method fork", f"{TWO} --start-method fork probe.py"),
    _case("start method forkserver", f"{TWO} --start-method forkserver probe.py"),
    _case("a script that is not there", f"{TWO} nowhere.py", "looked at before", world=0),
    _case("a program that is not there", f"{TWO} --no-python ./nowhere", "looked at before", world=0),
    _case("torch.distributed.launch", f"{TWO} --use-env probe.py a", module="torch.distributed.launch"),
    # --- environment ---
    _case(
        "PET_ variables",
        "probe.py",
        VARIABLES,
        env={"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "4", "PET_ROLE": "pet"},
    ),
    _case(
        "an option beats PET_",
        f"{TWO} --role flag probe.py",
        VARIABLES,
        env={"PET_NPROC_PER_NODE": "3", "PET_ROLE": "pet"},
    ),
    _case(
        "PET_ flags",
        "{scripts}/probe.py a",
        VARIABLES,
        "run path",
        env={"PET_NPROC_PER_NODE": "2", "PET_RUN_PATH": "1", "PET_MODULE": "0"},
    ),
    _case("PET_ flag as a word", f"{TWO} probe.py", "true and false", env={"PET_STANDALONE": "true"}),
    _case("PET_ with a bad number", "probe.py", env={"PET_MAX_RESTARTS": "many"}, world=0),
    _case("OMP_NUM_THREADS", f"{TWO} probe.py", env={"OMP_NUM_THREADS": "3"}),
    _case("NCCL's error handling", f"{TWO} probe.py", env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    _case(
        "an outer launcher's variables",
        f"{TWO} probe.py",
        env={"RANK": "9", "LOCAL_RANK": "9", "WORLD_SIZE": "10", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "5"},
    ),
    _case("virtual local rank", f"{TWO} --virtual-local-rank probe.py"),
    _case(
        "virtual local rank, devices", f"{TWO} --virtual-local-rank probe.py", env={"CUDA_VISIBLE_DEVICES": "4,GPU-5"}
    ),
    # --- how many, where ---
    _case("standalone", f"--standalone {TWO} probe.py"),
    _case("standalone wins", f"--standalone {TWO} --rdzv-id job --rdzv-endpoint nowhere:1 probe.py"),
    _case("nproc cpu", "--nproc-per-node cpu probe.py", world=CPUS),
    _case("nproc auto", "--nproc-per-node auto probe.py", world=CPUS),
    _case("nproc gpu", "--nproc-per-node gpu probe.py", USAGE, world=0),
    _case("nproc xpu", "--nproc-per-node xpu probe.py", USAGE, world=0),
    _case("nproc 0", "--nproc-per-node 0 probe.py", USAGE, world=0),
    _case("nproc a word", "--nproc-per-node some probe.py", USAGE, world=0),
    _case("nnodes 1:1", f"--nnodes 1:1 {TWO} probe.py"),
    _case("nnodes 0", "--nnodes 0 probe.py", USAGE, world=0),
    _case("nnodes 2:1", "--nnodes 2:1 probe.py", USAGE, world=0),
    _case("nnodes a word", "--nnodes some probe.py", USAGE, world=0),
    _case("rendezvous id", f"{LOGS} --rdzv-id job -r 3 probe.py"),
    _case(
        "c10d on this machine", f"--rdzv-backend c10d --rdzv-endpoint localhost:{{port}} --rdzv-id job {TWO} probe.py"
    ),
    _case("static on this machine", f"--master-addr 127.0.0.1 --master-port {{port}} --node-rank 0 {TWO} probe.py"),
    _case("rendezvous settings", f"--rdzv-conf timeout=30,read_timeout=20 {TWO} probe.py"),
    _case("bad rendezvous settings", "--rdzv-conf timeout probe.py", USAGE, world=0),
    _case("unknown rendezvous", "--rdzv-backend nope --rdzv-endpoint localhost:{port} probe.py", USAGE, world=0),
    _case("local address", f"--local-addr 127.0.0.1 {TWO} probe.py"),
    # --- streams ---
    _case("redirect both", f"{LOGS} -r 3 probe.py"),
    _case("redirect stdout", f"{LOGS} --redirects 1 probe.py"),
    _case("redirect stderr", f"{LOGS} --redirects=2 probe.py"),
    _case("redirect by rank", f"{LOGS} -r 0:3,1:1 probe.py"),
    _case("redirect one rank", f"{LOGS} -r 1:3 probe.py"),
    _case("redirect, no directory", f"{TWO} -r 3 probe.py"),
    _case("redirect a rank that is not there", f"{LOGS} -r 0:3,5:3 probe.py"),
    _case("redirect 4", f"{LOGS} -r 4 probe.py", USAGE, world=0),
    _case("redirect nonsense", f"{LOGS} -r 0:3, probe.py", USAGE, world=0, quick=True),
    _case("tee both", f"{LOGS} -t 3 probe.py", TEE),
    _case("tee by rank", f"{LOGS} --tee 0:1,1:2 probe.py", TEE),
    _case("tee and redirect", f"{LOGS} -t 0:1 -r 3 probe.py", TEE),
    _case("tee, a role", f"{LOGS} -t 3 --role trainer probe.py", TEE),
    _case("tee, a last line without an end", "--log-dir {log} -t 1 probe.py 0=unended", TEE, world=1),
    _case("text that was not flushed", f"{LOGS} -r 1 probe.py 0=unflushed", "whole lines"),
    _case(
        "PET_ streams",
        f"{TWO} probe.py",
        TEE,
        VARIABLES,
        env={"PET_TEE": "0:3", "PET_REDIRECTS": "1:3", "PET_LOG_DIR": "{home}/node0/log"},
        quick=True,
    ),
    _case("one rank on the console", f"{LOGS} --local-ranks-filter 1 probe.py"),
    _case("one rank of a tee on the console", f"{LOGS} -t 3 --local-ranks-filter 0 probe.py", TEE),
    _case("one rank of redirects on the console", f"{LOGS} -r 1 --local-ranks-filter 0 probe.py"),
    _case("a rank that is not there on the console", f"{LOGS} --local-ranks-filter 0,7 probe.py"),
    _case("a ranks filter of words", f"{LOGS} --local-ranks-filter a probe.py", USAGE, world=0),
    _case("filtered stdout", f"{LOGS} -t 3 --duplicate-stdout-filters apples probe.py", TEE),
    _case(
        "filtered stdout and stderr",
        f"{LOGS} -t 3 --duplicate-stdout-filters pears --duplicate-stderr-filters err,x probe.py",
        TEE,
    ),
    _case("a filter with a comma", f"{LOGS} -t 1 --duplicate-stdout-filters '0,, pears' probe.py", TEE),
    _case("a filter without a tee", f"{LOGS} -r 3 --duplicate-stdout-filters apples probe.py"),
    _case("a filter that nothing fits", f"{LOGS} -t 3 --duplicate-stdout-filters plums probe.py", TEE),
    _case(
        "a filter and one rank shown",
        f"{LOGS} -t 3 --local-ranks-filter 1 --duplicate-stdout-filters apples probe.py",
        TEE,
    ),
    _case("no logs", f"{TWO} --log-dir /dev/null probe.py"),
    _case("no logs, redirected", f"{TWO} --log-dir /dev/null -r 3 probe.py"),
    _case("no logs, tee'd", f"{TWO} --log-dir /dev/null -t 3 probe.py"),
    _case("no logs, one rank", f"{TWO} --log-dir /dev/null --local-ranks-filter 0 probe.py", "filters without files"),
    _case("completion", "--print-completion bash", "completion", world=0, since=(2, 15)),
    _case("logs in a file's place", f"{TWO} --log-dir {{scripts}}/probe.py -r 3 probe.py", USAGE, world=0),
    _case(
        "a prefix",
        f"{LOGS} -t 3 probe.py",
        TEE,
        VARIABLES,
        env={PREFIX: "${role_name}/${rank}/${local_rank}> "},
    ),
    _case(
        "a prefix, written otherwise",
        f"{LOGS} -t 3 probe.py",
        TEE,
        VARIABLES,
        env={PREFIX: "$$ $rank ${other} "},
    ),
    _case(
        "a prefix, as an option",
        f"{LOGS} -t 3 --log-line-prefix-template '${{role_name}}/${{rank}}/${{local_rank}}> ' probe.py",
        TEE,
        since=(2, 15),
    ),
    _case(
        "a prefix, as an option and in the environment",
        f"{LOGS} -t 3 --log-line-prefix-template '$$ ${{rank}} ${{other}} ' probe.py",
        TEE,
        VARIABLES,
        env={PREFIX: "${rank}> "},
        since=(2, 15),
    ),
    # --- ends ---
    _case("exit code 7", f"{LOGS} -r 3 probe.py 1=7 0=hold", quick=True),
    _case("exit with a text", f"{TWO} probe.py 0=text 1=hold"),
    _case("an exception", f"{LOGS} probe.py 1=raise 0=hold", "error files"),
    _case("killed", f"{LOGS} -t 3 probe.py 0=SIGKILL 1=hold", TEE),
    _case("segmentation fault", f"{LOGS} probe.py 0=SIGSEGV 1=hold"),
    _case("a rank ends itself by SIGTERM", f"{TWO} probe.py 0=SIGTERM 1=hold"),
    _case("others are told by SIGTERM", f"{TWO} probe.py 1=7 0=hold trap=SIGTERM"),
    _case("one rank is done before", f"{TWO} probe.py 1=0"),
    _case(
        "recorded: an exception",
        f"{LOGS} probe.py record 1=raise 0=hold",
        env=OUTER,
    ),
    _case(
        "recorded: exit code 7",
        f"{LOGS} probe.py record 1=7 0=hold",
        env=OUTER,
    ),
    _case(
        "recorded: segmentation fault",
        f"{LOGS} probe.py record 1=SIGSEGV 0=hold",
        env=OUTER,
    ),
    _case("recorded: nothing happens", f"{LOGS} probe.py record"),
    _case("a restart", f"{LOGS} --max-restarts 1 -r 3 probe.py 1once=7 0once=hold", quick=True),
    _case(
        "a restart, tee'd",
        f"{LOGS} --max-restarts 2 -t 3 --duplicate-stdout-filters pears probe.py 0once=SIGKILL 1once=hold",
        TEE,
    ),
    _case("restarts run out", f"{LOGS} --max-restarts 1 -r 3 probe.py 1=7 0=hold"),
    _case("no restart", f"{LOGS} --max-restarts 0 probe.py 1once=7 0once=hold"),
    _case("a bug restarts too", f"{LOGS} --max-restarts 2 -r 3 probe.py all=raise", "error files"),
    # --- signals ---
    _case("SIGTERM", f"{TWO} probe.py all=hold", signal="SIGTERM"),
    _case("SIGINT", f"{TWO} probe.py all=hold trap=SIGINT", signal="SIGINT"),
    _case("SIGHUP", f"{TWO} probe.py all=hold trap=SIGHUP", signal="SIGHUP"),
    _case("SIGQUIT", f"{TWO} probe.py all=hold trap=SIGQUIT", signal="SIGQUIT"),
    _case("SIGTERM, handled", f"{LOGS} -r 3 probe.py all=hold trap=SIGTERM", signal="SIGTERM"),
    _case(
        "SIGUSR1, to be handled",
        f"{TWO} --signals-to-handle SIGTERM,SIGUSR1 probe.py all=hold trap=SIGUSR1",
        signal="SIGUSR1",
    ),
    _case(
        "SIGUSR2, to be handled", f"{TWO} --signals-to-handle=SIGUSR2 probe.py all=hold trap=SIGUSR2", signal="SIGUSR2"
    ),
    _case("unknown signals", f"{TWO} --signals-to-handle SIGTERM,SIGNOPE probe.py", "signal names", world=2),
    _case("a worker that does not end", f"{TWO} --shutdown-timeout 1 probe.py all=deaf", signal="SIGTERM"),
    _case(
        "the same, by a variable",
        f"{TWO} probe.py all=deaf",
        signal="SIGTERM",
        env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"},
    ),
    # --- what is refused ---
    _case("no script", TWO, world=0),
    _case("an unknown option", "--nope probe.py", world=0, quick=True),
    _case("a bad number", "--max-restarts many probe.py", world=0),
    _case("a negative number", "--max-restarts -1 probe.py", USAGE, world=0),
    _case("a bad choice", "--start-method thread probe.py", world=0),
    _case("a bad interval", "--monitor-interval often probe.py", world=0),
    _case("a bad binding", f"{TWO} --numa-binding nope probe.py", world=0),
    _case("help", "--help", world=0),
    # --- what means little here ---
    _case("an interval", f"{TWO} --monitor-interval 0.5 probe.py"),
    _case("events to the console", f"{TWO} --event-log-handler console probe.py"),
    _case("events of rendezvous", f"{TWO} --event-log-handler dynamic_rendezvous probe.py"),
    _case("an unknown event handler", f"{TWO} --event-log-handler nope probe.py", USAGE, world=2),
    _case("unknown logs specs", f"{TWO} --logs-specs nope probe.py", USAGE, world=0),
    # --- two agents ---
    _case("two agents, static", f"{STATIC} -t 3 probe.py a", TEE, agents=2, world=4, quick=True),
    _case("two agents, c10d", f"{C10D} -t 3 probe.py a", TEE, agents=2, world=4, any_order=True),
    _case(
        "two agents, a prefix",
        f"{STATIC} -t 3 probe.py a",
        TEE,
        VARIABLES,
        agents=2,
        world=4,
        env={PREFIX: "${rank}/${local_rank}> "},
    ),
    _case(
        "two agents, all fail",
        f"{STATIC} -r 3 probe.py all=7",
        agents=2,
        world=4,
    ),
    _case(
        "two agents, a restart", f"{C10D} --max-restarts 1 -r 3 probe.py allonce=7", agents=2, world=4, any_order=True
    ),
    _case(
        "two agents, one rank fails once",
        f"{C10D} --max-restarts 1 -r 3 probe.py 1once=7 allonce=hold",
        "one count of restarts",
        agents=2,
        world=4,
        any_order=True,
    ),
    _case("two agents, SIGTERM", f"{STATIC} probe.py all=hold trap=SIGTERM", agents=2, world=4, signal="SIGTERM"),
)
