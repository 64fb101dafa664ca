"""The known names that a misspelled word may mean. Pure."""

from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import takewhile

_ALIKE = 0.65
"""The least likeness of a suggestion: 1 for the same word."""
_SAME = 0.05
"""Names that are this close to the best one are suggested too."""


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that are most like the word, or that begin as it does; the best first, none if no name is close."""
    scored = sorted(
        ((_likeness(word, name), name) for name in names), key=lambda each: (-each[0], len(each[1]), each[1])
    )
    best = scored[0][0] if scored else 0.0
    return [name for score, name in scored if score >= max(_ALIKE, best - _SAME)]


def _likeness(word: str, name: str) -> float:
    begins = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, name, strict=False))) / max(
        1, len(word)
    )
    return max(begins, SequenceMatcher(None, word, name).ratio())
