"""A host that is broken in one of several ways, and comes back."""

import signal

from kit.fleet import Fleet
from kit.netns import Hosts

LOST = ("power", "agent", "link", "reject", "freeze", "pause")
"""Each costs the host its ranks."""
PAUSE_TIMEOUTS = 1.5
_ENDED = "this node ends its workers"


class Breakage:
    """Breaks a host at once. `undo` brings it back."""

    def __init__(self, job: Fleet, net: Hosts, host: int, how: str) -> None:
        self._job, self._net, self._host, self._how = job, net, host, how
        self._ended = job.agents[host].output.count(_ENDED)
        if how == "power":
            job.power_off(host)
        elif how == "agent":
            job.agents[host].process.kill()
        elif how == "link":
            net.cut(host)
        elif how == "reject":
            net.reject(host)
        elif how == "freeze":
            job.agents[host].everything(signal.SIGSTOP)
        else:
            job.pause([host], PAUSE_TIMEOUTS)

    def undo(self) -> None:
        """Bring the host back. A host that was cut off has ended its workers before."""
        if self._how in {"power", "agent"}:
            self._job.restart(self._host)
            self._job.wait_output(self._host, "joined run")  # until then the job may count on the host as it was
        elif self._how == "freeze":
            self._job.agents[self._host].everything(signal.SIGCONT)
        else:
            self._wait_fenced()
        if self._how == "link":
            self._net.mend(self._host)
        elif self._how == "reject":
            self._net.reject(self._host, undo=True)

    def _wait_fenced(self) -> None:
        agent = self._job.agents[self._host]
        self._job.look_until(lambda: agent.output.count(_ENDED) > self._ended, f"fence of host {self._host}")
