"""Comparison of the states that the workers of two runs wrote."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deadpool_run.text import shortened
from deadpool_run.wire.check import STATES

_EXACT_KINDS = ("weights", "buffers", "optimizer", "gradients")
"""Kinds that must be equal in two runs without a fault."""
_KINDS = (*_EXACT_KINDS, "values", "generators", "attributes")
"""All kinds, in the order in which differences are shown."""
_LAST_KIND = "attributes"
"""A kind that counts at the last version only, because each forward creates most of it."""

Digests = Mapping[str, Mapping[str, str]]
"""By kind, then by name."""


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A tensor or value that differs from the run without a fault, and the first version in which it does."""

    version: int
    rank: int
    kind: str
    name: str


def in_words(differences: Sequence[StateDifference]) -> str:
    """Return a phrase with the first differences and the number of others; empty without any."""
    if not differences:
        return ""
    first = differences[0]
    alike = [each for each in differences if (each.version, each.kind) == (first.version, first.kind)]
    names, ranks = list(dict.fromkeys(each.name for each in alike)), sorted({each.rank for each in alike})
    where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    rest = len(differences) - len(alike)
    return f"from step {first.version}: {first.kind} {shortened(names)} ({where})" + (
        f", later {rest} more" if rest else ""
    )


class RunStates:
    """The states of all ranks of a run."""

    def __init__(self, folder: Path) -> None:
        self.seen: dict[tuple[int, int], list[Digests]] = {}
        """By rank and version: the digests of each time it was taken."""
        for path in sorted(folder.glob(STATES)):
            rank = int(path.name.removeprefix("rank").partition(".")[0])
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):  # else its writer was killed
                    record = json.loads(line)
                    self.seen.setdefault((rank, record["version"]), []).append(record["digests"])

    def __bool__(self) -> bool:
        return bool(self.seen)

    @property
    def last(self) -> int:
        """The newest version."""
        return max((version for _, version in self.seen), default=0)

    def missing(self, ranks: int, version: int) -> list[int]:
        """Return the ranks without this version."""
        return [rank for rank in range(ranks) if (rank, version) not in self.seen]

    def differences(self, reference: "RunStates", ignored: Collection[tuple[str, str]] = ()) -> list[StateDifference]:
        """Return the differences, earliest first, each name of each rank once. `ignored`: kinds and names."""
        last = reference.last
        found: dict[tuple[int, str, str], StateDifference] = {}
        for (rank, version), seen in sorted(self.seen.items()):
            expected = reference.seen.get((rank, version), [])
            for digests in seen if expected else ():
                for kind, name in _unequal(expected, digests, whole=version == last):
                    if (kind, name) not in ignored:
                        found.setdefault((rank, kind, name), StateDifference(version, rank, kind, name))
        return sorted(found.values(), key=lambda each: (each.version, _KINDS.index(each.kind), each.rank, each.name))

    def diverging(self) -> tuple[int, tuple[str, ...]] | None:
        """Return the version in which weights first differ between ranks, after all ranks had them equal; and their names."""
        equal: set[str] = set()
        for version in sorted({version for _, version in self.seen}):
            looks = [seen[-1].get("weights", {}) for (_, at), seen in sorted(self.seen.items()) if at == version]
            names = [name for name in looks[0] if len(looks) > 1 and all(name in look for look in looks)]
            same = {name for name in names if len({look[name] for look in looks}) == 1}
            if apart := [name for name in names if name in equal - same]:
                return version, tuple(apart)
            equal |= same
        return None


def split(differences: Sequence[StateDifference]) -> tuple[list[StateDifference], set[tuple[str, str]]]:
    """Split the differences of two runs without a fault: those that must not be, and kinds and names that differ by chance."""
    real = [each for each in differences if each.kind in _EXACT_KINDS]
    return real, {(each.kind, each.name) for each in differences if each.kind not in _EXACT_KINDS}


def _unequal(expected: Sequence[Digests], seen: Digests, *, whole: bool) -> Iterator[tuple[str, str]]:
    """Yield kind and name of each value that equals none of the reference's, which has several if step 1 ran twice.

    Kinds that `seen` lacks were not recorded. `whole`: this is the last version. Before it, a value that one of the two lacks
    does not count, because it may come later.
    """
    for kind, other in seen.items():
        if kind == _LAST_KIND and not whole:
            continue
        looks = [each.get(kind, {}) for each in expected]
        for name in {**looks[-1], **other}:
            known = [one.get(name) for one in looks]
            if other.get(name) not in known and (whole or (None not in known and name in other)):
                yield kind, name
