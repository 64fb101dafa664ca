"""The intended differences between torchrun and deadpool-run, which docs/torchrun.md lists."""

import re
from dataclasses import dataclass

from compat_cases import Case


@dataclass(frozen=True, slots=True)
class Difference:
    """One intended difference. `where` are the paths that it may show at; empty: no case can show it."""

    reason: str
    where: str = ""
    always: bool = False
    """Cases show it without naming it."""
    unless: str = ""
    """Command lines that must not show it."""

    def explains(self, path: str, case: Case) -> bool:
        return bool(re.fullmatch(self.where, path)) and not (self.unless and re.search(self.unless, case.line))


_WORKER = r"workers/[^/]+"
_TREE = r"nodes/\d/tree"

DIFFERENCES = {
    # --- every case shows these ---
    "more variables": Difference(
        "Workers have `DEADPOOL_*` variables in addition to torchrun's, for scripts that call `init()`.",
        rf"{_WORKER}/env/DEADPOOL_\w+",
        always=True,
    ),
    "hash seed": Difference(
        "`PYTHONHASHSEED` is 1 unless it is a number, so that a replacement orders sets of strings as the lost rank did.",
        rf"{_WORKER}/env/PYTHONHASHSEED",
        always=True,
    ),
    "store": Difference(
        "The job's store has its own process and a free port, on the first machine. `MASTER_ADDR` and `MASTER_PORT` "
        "name it, as an IP address. The launchers meet elsewhere. So two jobs on a machine never use the same port.",
        rf"{_WORKER}/env/MASTER_(ADDR|PORT)",
        always=True,
    ),
    "run id": Difference(
        "The name of a run is `--rdzv-id`, else its time. torchrun on one machine, without a rendezvous, invents a "
        "name and ignores `--rdzv-id`.",
        rf"{_WORKER}/env/TORCHELASTIC_RUN_ID|nodes/\d/tree's name",
        always=True,
        unless=r"^(?!.*--standalone).*--rdzv-backend c10d",
    ),
    "imported already": Difference(
        "Workers are forked from a process that has imported torch: `sys.modules` holds it before the script imports "
        "it. So what the script sets for that import, such as `TORCH_LOGS`, has no effect, except for `OMP_NUM_THREADS` "
        "if it calls `init()`. `--start-method spawn` gives each worker a fresh interpreter.",
        rf"{_WORKER}/torch is imported",
        always=True,
        unless=r"--start-method spawn|--no-python (?!.*/probe.py)",
    ),
    "SIGUSR1 and SIGUSR2": Difference(
        "Workers start with both ignored, until the script handles them: Slurm's `--signal` reaches every process of "
        "a job, and by default would end it.",
        rf"{_WORKER}/signals/ignored",
        always=True,
    ),
    # --- some cases show these ---
    "exit code 2": Difference(
        "Every error in the command line ends with code 2 and two lines that say what to do. torchrun returns 2 for "
        "errors of its parser and 1, with a traceback, for the rest.",
        r"exit",
    ),
    "looked at before": Difference(
        "A missing script or program is reported before anything starts (exit code 2).",
        rf"exit|{_TREE}.*|nodes/\d/tree's name",
    ),
    "launcher's variables": Difference(
        "Variables that configure a launcher (`PET_*`, `TORCHELASTIC_*`) are not passed on to workers, where another "
        "launcher would use them.",
        rf"{_WORKER}/env/(PET_\w+|TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE)",
    ),
    "true and false": Difference(
        "Variables of flags also accept true and false; torchrun takes 1 and 0 only.",
        r".*",
    ),
    "completion": Difference(
        "`--print-completion` prints deadpool-run's own script, for bash, zsh, fish and PowerShell, and needs no further "
        "package; torchrun's needs shtab, and knows bash, zsh and tcsh.",
        r"exit",
    ),
    "signal names": Difference(
        "An unknown name in `--signals-to-handle` is refused; torchrun ignores it.",
        r".*",
    ),
    "tee without delay": Difference(
        "A teed stream is a pipe to the launcher, which writes the file at once, and whole lines to the console. "
        "torchrun reads the file every tenth of a second, and may cut lines in two.",
        rf"{_WORKER}/streams",
    ),
    "whole lines": Difference(
        "Standard output is line-buffered, so lines of several ranks do not mix; torchrun's workers are unbuffered "
        "(`python -u`). Text without a newline or a flush is lost if the process is killed.",
        rf"{_TREE}/attempt_0/0/stdout.log",
    ),
    "error files": Difference(
        "Every exception that ends a script is in its `error.json`, in torchrun's form, also without `@record`.",
        rf"{_TREE}/attempt_\d/\d/error.json.*",
    ),
    "run path": Difference(
        "With `--run-path` workers are the same as without: they lead a session of their own, and start with the "
        "script's folder on `sys.path`.",
        rf"{_WORKER}/(flags|leads its session|path)",
    ),
    "filters without files": Difference(
        "`--local-ranks-filter` also works with `--log-dir /dev/null`.",
        r"nodes/\d/std(out|err)|workers/1-0/streams",
    ),
    "one count of restarts": Difference(
        "All machines of a job share one count of restarts. torchrun's launchers count their own, and a machine whose"
        " workers restart because of another machine does not count it.",
        rf"workers/[23]-[01]/.*|{_TREE}/.*",
    ),
    # --- no case can show these ---
    "number of ranks": Difference(
        "It is fixed: `--nnodes MIN:MAX` with two numbers is refused, with the line to write instead. Machines beyond"
        " what the ranks need are spares."
    ),
    "who has which rank": Difference(
        "Ranks go to machines by `--node-rank`, else by arrival, and stay there; torchrun's c10d rendezvous sorts "
        "addresses again each time."
    ),
    "peers of a failure": Difference(
        "When no restart is left, workers on other machines end at once too; under torchrun they end by their own "
        "timeouts."
    ),
    "end of a job": Difference(
        "Launchers exit when the coordinator reports that all ranks are done; there is no barrier of 300 seconds."
    ),
    "a killed launcher": Difference(
        "If the launcher dies, its workers end with it; torchrun's workers continue without it."
    ),
    "second signal": Difference("A second signal kills the workers; torchrun starts to wait for them again."),
    "what launchers say": Difference(
        "One line for each event, on standard error, starting with `deadpool-run:`; neither a traceback of the "
        "launcher nor a table."
    ),
    "timers": Difference(
        "`TORCHELASTIC_ENABLE_FILE_TIMER` and `TORCHELASTIC_HEALTH_CHECK_PORT` have no effect; `--hang-timeout` finds"
        " ranks that hang."
    ),
    "other accelerators": Difference("`--nproc-per-node xpu` is refused: write the number."),
}
