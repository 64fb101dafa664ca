"""Options in a batch script. Only they show whether a running job was submitted with `--no-kill`. Pure."""

import shlex
from collections.abc import Iterator

_MARK = "#SBATCH"
_SHORT_WITH_VALUE = frozenset("aAbBcCdDeFGiIJLmMnNopqStvwx")
"""Short options of sbatch(1) whose value may follow in the same word: `-Nk` is a value, not `-N -k`."""


def options(script: str) -> Iterator[str]:
    """Yield the words of the `#SBATCH` lines before the first command, where sbatch(1) stops reading."""
    for line in script.splitlines():
        if line.startswith(_MARK):
            try:
                yield from shlex.split(line[len(_MARK) :], comments=True)
            except ValueError:  # an unmatched quote, which sbatch has accepted
                yield from line[len(_MARK) :].split()
        elif line.strip() and not line.lstrip().startswith("#"):
            return


def survives_node_loss(script: str) -> bool:
    """Return whether the script itself asks for `--no-kill`; the last of several counts."""
    asked = False
    for word in options(script):
        if word in {"--no-kill", "--no-kil", "--no-ki", "--no-k"} or _has_flag(word, "k"):
            asked = True
        elif word.startswith("--no-k") and word.partition("=")[2] == "off":
            asked = False
    return asked


def _has_flag(word: str, flag: str) -> bool:
    """Return whether a cluster of short options such as `-sk` holds the flag."""
    if not word.startswith("-") or word.startswith("--"):
        return False
    for letter in word[1:]:
        if letter == flag:
            return True
        if letter in _SHORT_WITH_VALUE:
            return False
    return False
