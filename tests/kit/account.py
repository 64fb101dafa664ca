"""The events that a training script writes: the process of each rank, and the digest of every state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
States = Mapping[tuple[int, int], str]
"""(rank, version) to digest."""


@dataclass(frozen=True)
class Account:
    """Events of one job, in the order in which they were written."""

    events: Sequence[Event]

    def of(self, kind: str, **fields: object) -> list[Event]:
        """Return the events of a kind whose fields have these values."""
        return [
            e for e in self.events if e["kind"] == kind and all(e.get(key) == value for key, value in fields.items())
        ]

    def states(self) -> dict[tuple[int, int], str]:
        """Return the digest of every state that was reached. Where a step ran again, the last one counts."""
        return {(e["rank"], e["version"]): e["digest"] for e in self.of("state")}

    def pids(self, rank: int) -> list[int]:
        """Return the processes that held the rank, in order."""
        return list(dict.fromkeys(e["pid"] for e in self.of("start", rank=rank)))

    def check_same_as(self, reference: States) -> None:
        """Assert that every state of every process equals the reference, and that every state was reached."""
        wrong = [
            f"rank {e['rank']} (pid {e['pid']}) at version {e['version']}"
            for e in self.of("state")
            if reference.get((e["rank"], e["version"])) != e["digest"]
        ]
        assert not wrong, f"the first states that differ from the unfailed run: {wrong[:8]}"
        missing = sorted(reference.keys() - self.states().keys())
        assert not missing, f"(rank, version) never reached: {missing[:8]}"

    def steps_repeated(self) -> int:
        """Return the largest number of versions that a process went back."""
        newest: dict[int, int] = {}
        repeated = 0
        for e in self.of("state"):
            repeated = max(repeated, newest.get(e["pid"], 0) - e["version"])
            newest[e["pid"]] = max(newest.get(e["pid"], 0), e["version"])
        return repeated

    def check_steps_repeated(self, effects: Sequence[Event]) -> None:
        """Assert that no process and no repair went back further than promised.

        The promise is one step. If the coordinator made snapshots rarer, because they did not keep up on a busy machine,
        it is three capture intervals: each doubling skips one snapshot, and the last one may be unfinished.
        `effects` are the coordinator's.
        """
        intervals = [effect["interval"] for effect in effects if effect["type"] == "SetCaptureInterval"]
        repairs = [effect["incident"]["steps_repeated"] for effect in effects if effect["type"] == "ReportIncident"]
        most = 3 * max(intervals) if intervals else 1
        assert max([self.steps_repeated(), *repairs]) <= most, (
            f"{self.steps_repeated()} steps were repeated, {repairs} in each repair; {most} are allowed"
        )

    def check_one_at_a_time(self) -> None:
        """Assert that no process of a rank wrote an event after the rank's next process had started.

        Hosts that freeze or are cut off break this rule: their processes end only when they hear of the loss.
        """
        holders: dict[int, list[int]] = {}
        for e in self.events:
            held = holders.setdefault(e["rank"], [])
            if e["pid"] not in held:
                held.append(e["pid"])
            assert e["pid"] == held[-1], f"rank {e['rank']} was held by {held[-1]}, and pid {e['pid']} wrote {e}"

    def check_ranks(self, lost: Sequence[int], world_size: int = 4) -> None:
        """Assert that each rank had one process more than it had losses, and that no process held two ranks."""
        holders = {rank: self.pids(rank) for rank in range(world_size)}
        lives = {rank: 1 + list(lost).count(rank) for rank in range(world_size)}
        assert {rank: len(pids) for rank, pids in holders.items()} == lives, f"processes of each rank: {holders}"
        everyone = [pid for pids in holders.values() for pid in pids]
        assert len(everyone) == len(set(everyone)), f"a process held two ranks: {holders}"
