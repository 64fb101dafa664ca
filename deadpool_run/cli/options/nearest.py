"""The known names that a misspelled word may mean. Pure."""

from collections.abc import Iterable
from difflib import SequenceMatcher
from os.path import commonprefix

_ALIKE = 0.65
"""The lowest similarity of a suggestion; 1 for the same word."""
_SAME = 0.05
"""Names within this distance of the best one are suggested too."""


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that are most similar to the word or begin like it, the best first; none if no name is close."""
    scored = sorted(
        ((_similarity(word, name), name) for name in names), key=lambda each: (-each[0], len(each[1]), each[1])
    )
    best = scored[0][0] if scored else 0.0
    return [name for score, name in scored if score >= max(_ALIKE, best - _SAME)]


def _similarity(word: str, name: str) -> float:
    begins = len(commonprefix([word, name])) / max(1, len(word))  # noqa: RUF071 - words, not paths
    return max(begins, SequenceMatcher(None, word, name).ratio())
