"""A real Slurm with several simulated nodes on this machine. It needs Debian's `slurm-wlm`, but no root, munge or cgroups.

Every daemon is a child of the test (`-D`: it stays in the foreground), with its own folder and ports. So labs do not meet
each other or a Slurm to which this machine belongs. A node's daemons are recognized by its open log file, its tasks by
its name in their environment.

`python -m kit.slurm_lab [FOLDER]`, in the tests folder, runs a lab until you interrupt it.
"""

import contextlib
import getpass
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree, which
from typing import Any

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
UP_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 60.0

_SLURM_CONF = """\
ClusterName=lab
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={controller_port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
SlurmctldPidFile={home}/run/slurmctld.pid
SlurmdPidFile={home}/run/%n.pid
SlurmctldLogFile={home}/log/slurmctld.log
SlurmdLogFile={home}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
TopologyPlugin=topology/tree
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={silence_s}
SlurmctldTimeout=30
KillWait=5
MessageTimeout=10
TreeWidth=65533
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.{last} Port={port} CPUs=4 Gres=gpu:2 RealMemory=1000 State=UNKNOWN"


def missing() -> str | None:
    """Return why this machine cannot run a lab; None if it can."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    return f"no Slurm here ({', '.join(absent)} not found): see `make test-slurm`" if absent else None


def _program(name: str) -> str | None:
    return which(name) or which(name, path="/usr/sbin:/usr/local/sbin:/opt/slurm/sbin:/opt/slurm/bin")


class SlurmLab:
    """`nodes` simulated nodes, n1 and so on, in two failure domains. `home` is an empty folder. Call `close` at the end."""

    def __init__(self, home: Path, nodes: int = 4, silence_s: int = 20) -> None:
        self.home = home
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.work = home / "work"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("etc", "state", "spool", "log", "run", "bin", "work"):
            (home / name).mkdir()
        self._configure(silence_s)
        self._write_commands()
        try:
            self._start("slurmctld", "-c")
            for name in self.nodes:
                self._start("slurmd", "-N", name, node=name)
            self.run("srun", f"-N{nodes}", f"-n{nodes}", "true", timeout_s=UP_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def _configure(self, silence_s: int) -> None:
        host = socket.gethostname().partition(".")[0]
        controller, *ports = _free_ports(1 + len(self.nodes))
        described = (
            _NODE.format(name=name, host=host, last=10 + number, port=port)
            for number, (name, port) in enumerate(zip(self.nodes, ports, strict=True), 1)
        )
        text = _SLURM_CONF.format(
            host=host,
            user=getpass.getuser(),
            home=self.home,
            controller_port=controller,
            first_job=100 * controller,  # unique, too: agents of two labs must not meet
            silence_s=silence_s,
            nodes="\n".join(described),
            names=",".join(self.nodes),
        )
        half = (len(self.nodes) + 1) // 2
        leaves = {"leaf0": self.nodes[:half], "leaf1": self.nodes[half:]}
        topology = [
            f"SwitchName={failure_domain} Nodes={','.join(names)}" for failure_domain, names in leaves.items() if names
        ]
        topology.append(
            f"SwitchName=top Switches={','.join(failure_domain for failure_domain, names in leaves.items() if names)}"
        )
        (self.home / "etc/slurm.conf").write_text(text)
        (self.home / "etc/topology.conf").write_text("\n".join(topology) + "\n")
        # Devices that every machine has take the place of GPUs: Slurm only passes their numbers.
        (self.home / "etc/gres.conf").write_text("Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n")
        # 22.05 refuses `disabled`, the correct value from 23.02 on. It loads v1 and never uses it.
        (self.home / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _write_commands(self) -> None:
        """Put this source tree's `deadpool-run` and `python` into the PATH of batch scripts."""
        root = Path(__file__).parents[2]
        for name, words in (("deadpool-run", "-m deadpool_run "), ("python", "")):
            command = self.home / "bin" / name
            command.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} {words}"$@"\n')
            command.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of this lab's commands, without variables of a Slurm job or launcher that runs the test."""
        outer = ("SLURM", "SBATCH", "SQUEUE", "SALLOC", "DEADPOOL_", "PET_", "TORCHELASTIC_")
        path = (str(self.home / "bin"), *dict.fromkeys(str(Path(_program(name) or name).parent) for name in PROGRAMS))
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(outer)},
            "SLURM_CONF": str(self.home / "etc/slurm.conf"),
            "PATH": ":".join((*path, os.environ.get("PATH", ""))),
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "shared"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    # --- commands ------------------------------------------------------------------------------------------------

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as a user at a login node would."""
        done = subprocess.run(
            command,
            env={**self.environment, **(env or {})},
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        assert not check or done.returncode == 0, f"{command}: rc {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command; its output goes to `work/command.out`."""
        with (self.work / "command.out").open("wb") as output:
            return subprocess.Popen(
                command,
                env={**self.environment, **(env or {})},
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def sbatch(
        self, script: str | Path, *options: str, env: Mapping[str, str] | None = None, words: Sequence[str] = ()
    ) -> "Job":
        """Submit a batch script (its text, or its path) with these arguments."""
        if isinstance(script, str):
            path = self.work / f"script{len(list(self.work.glob('script*.sh')))}.sh"
            path.write_text(script)
        else:
            path = script
        told = self.run("sbatch", "--parsable", *options, str(path), *words, env=env).stdout
        return Job(self, int(told.partition(";")[0]))

    def states(self) -> dict[str, str]:
        """Return the state of each node, as Slurm reports it."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def wait_until(self, met: Callable[[], Any], what: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Any:
        """Return the first true value of `met`. It is polled, because Slurm offers nothing to wait for."""
        deadline = time.monotonic() + timeout_s
        while not (value := met()):
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s\n{self.told()}"
            time.sleep(0.05)
        return value

    def told(self) -> str:
        """Return the end of every output file, for a failure's message."""
        files = sorted(path for path in self.work.iterdir() if path.is_file() and path.suffix not in {".sh", ""})
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in files)

    # --- nodes ---------------------------------------------------------------------------------------------------

    def pids(self, node: str) -> list[int]:
        """Return the node's daemons, tasks and their descendants, children before their parents."""
        log, own = str(self.home / f"log/{node}.log"), set()
        parents: dict[int, int] = {}
        needles = (f"SLURMD_NODENAME={node}\0".encode(), f"SLURM_CONF={self.home}/etc/slurm.conf\0".encode())
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):  # it has ended
                pid, stat = int(entry.name), (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if stat[0] == b"Z":
                    continue
                parents[pid] = int(stat[1])
                environment = (entry / "environ").read_bytes() + b"\0"
                if all(needle in environment for needle in needles) or _holds(entry, log):
                    own.add(pid)
        while more := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= more
        return sorted(own, key=lambda pid: _depth(pid, parents), reverse=True)

    def kill_node(self, node: str) -> None:
        """Cut the node's power. Slurm notices it with `mark_down`, or after SlurmdTimeout."""
        self.freeze_node(node)  # first, so that no process can start another or send a message
        # Children first: when a parent ends, the kernel wakes its stopped children (SIGHUP, SIGCONT). A woken srun
        # would have the time to end its step on all other nodes.
        while pids := self.pids(node):
            _signal(pids, signal.SIGKILL)
            daemon = self._daemons.get(node)
            if daemon is not None and daemon.pid in pids:
                daemon.wait(10)
                del self._daemons[node]

    def freeze_node(self, node: str) -> None:
        """Stop all processes of the node: its connections stay open, and are silent."""
        stopped: set[int] = set()
        while fresh := set(self.pids(node)) - stopped:
            _signal(fresh, signal.SIGSTOP)
            stopped |= fresh

    def thaw_node(self, node: str) -> None:
        """Let a frozen node continue."""
        _signal(self.pids(node), signal.SIGCONT)

    def mark_down(self, node: str) -> None:
        """Tell Slurm that the node is dead. It would notice by itself after SlurmdTimeout."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lab")

    def lose_node(self, node: str) -> None:
        """Cut the node's power, and tell Slurm at once."""
        self.kill_node(node)
        self.mark_down(node)

    def revive_node(self, node: str) -> None:
        """Start a killed node again, and wait until it takes work."""
        for left in (self.home / "spool" / node).glob(f"{node}_*"):
            left.unlink()
        for left in (self.home / "spool" / node).glob("job*"):  # with it, Slurm refuses to run the same job here again
            rmtree(left)
        self._start("slurmd", "-N", node, node=node)
        self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self.wait_until(lambda: self.states()[node] in {"idle", "allocated", "mixed"}, f"{node} in service")

    # --- daemons -------------------------------------------------------------------------------------------------

    def _start(self, program: str, *options: str, node: str | None = None) -> None:
        path = _program(program)
        assert path is not None, missing()
        with (self.home / "log" / f"{node or program}.console").open("wb") as output:
            self._daemons[node or program] = subprocess.Popen(
                [path, "-D", *options],
                env=self.environment,
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def close(self) -> None:
        """End every job, daemon and task of this lab."""
        for node in self.nodes:
            self.kill_node(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait(10)
        # Processes without their node's name, and commands of the login node.
        needle = f"SLURM_CONF={self.home}/etc/slurm.conf\0".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if needle in (entry / "environ").read_bytes() + b"\0":
                        os.kill(int(entry.name), signal.SIGKILL)


class Job:
    """A submitted batch job."""

    def __init__(self, lab: SlurmLab, number: int) -> None:
        self.lab = lab
        self.number = number

    def field(self, name: str) -> str:
        """Return a field of `scontrol show job`; empty if the job is forgotten."""
        text = self.lab.run("scontrol", "show", "job", str(self.number), check=False).stdout
        fields = (word.partition("=") for word in text.split())
        return next((value for key, _, value in fields if key == name), "")

    @property
    def state(self) -> str:
        """The job's state in Slurm, such as RUNNING or COMPLETED."""
        return self.field("JobState")

    def wait(self, *states: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Wait until the job is in one of these states. Without states, wait until it has ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY")
        wanted = states or over
        return str(
            self.lab.wait_until(
                lambda: (state := self.state) in wanted and state, f"{wanted} of job {self.number}", timeout_s
            )
        )

    @property
    def exit_code(self) -> int:
        """The exit code of the batch script, once the job has ended."""
        return int(self.field("ExitCode").partition(":")[0])

    def output(self, pattern: str = "slurm-{}.out") -> str:
        """Return the output of the batch script so far."""
        path = self.lab.work / pattern.format(self.number)
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_output(self, text: str, timeout_s: float = COMMAND_TIMEOUT_S, pattern: str = "slurm-{}.out") -> None:
        """Wait until the batch script has printed this text."""
        self.lab.wait_until(lambda: text in self.output(pattern), f"{text!r} from job {self.number}", timeout_s)

    def wait_gone(self, node: str) -> None:
        """Wait until no process of the job is left on a node, so that it can start again. Slurm itself waits longer."""
        self.lab.wait_until(lambda: len(self.lab.pids(node)) == 1, f"end of job {self.number} on {node}")

    def hurry(self, task: str = "") -> None:
        """Start a requeued job, or a task of it, soon. Slurm itself waits for two minutes.

        It cannot start at once: Slurm revokes credentials of the second in which the job ended, and the start would fail.
        """
        self.lab.run("scontrol", "update", f"jobid={task or self.number}", "starttime=now+3")

    def signal_batch(self, name: str) -> None:
        """Send a signal as `--signal=B:NAME@TIME` would: to the batch shell alone."""
        self.lab.run("scancel", "--batch", f"--signal={name}", str(self.number))

    def cancel(self) -> None:
        """End the job as a user would."""
        self.lab.run("scancel", str(self.number), check=False)


def _free_ports(count: int) -> Sequence[int]:
    """Return ports outside the kernel's ephemeral range, so that no other process gets one before the daemon listens."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    free: list[int] = []
    for port in random.sample(range(first_given // 2, first_given), first_given // 4):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError(f"fewer than {count} ports are free below {first_given}")


def _holds(process: Path, path: str) -> bool:
    if not (process / "cmdline").read_bytes().partition(b"\0")[0].rpartition(b"/")[2].startswith(b"slurm"):
        return False
    return any(str(fd.readlink()) == path for fd in (process / "fd").iterdir())


def _depth(pid: int, parents: Mapping[int, int]) -> int:
    depth = 0
    while (pid := parents.get(pid, 0)) and depth < len(parents):
        depth += 1
    return depth


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        lab = SlurmLab(Path(sys.argv[1] if len(sys.argv) > 1 else folder))
        print(f"export SLURM_CONF={lab.home}/etc/slurm.conf PATH={lab.home}/bin:$PATH XDG_STATE_HOME={lab.home}/shared")
        try:
            signal.pause()
        finally:
            lab.close()
