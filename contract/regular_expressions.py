"""Regular expressions of tokenizers: which can be searched for in a text without taking for ever.

Tokenizers search with Oniguruma, which tries one way after another. An expression that repeats what can match in
several ways has more ways than anybody can try; of those that tokenizers use, none does.
"""

from __future__ import annotations

import re

_UNBOUNDED = 2
"""How many quantifiers without a bound may stand in one alternative: so many times the length multiplies."""
_DEPTH = 20
_PIECES = re.compile(
    r"(?P<escape>\\[pP]\{\^?\w{1,40}\}|\\x\{[0-9A-Fa-f]{1,6}\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\[^\dgkK])"
    r"|(?P<open>\((?:\?(?:[imxs-]{0,4}:|=|!|<=|<!|>))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<quantifier>[*+?][?+]?|\{\d{0,4}(?:,\d{0,4})?\}\??)|(?P<set>\[)|(?P<letter>[^\\()\[{}*+?|])",
    re.DOTALL,
)
"""What expressions are made of; references to their own parts (\\1, \\k, \\g) are none of it."""


def is_quick(expression: str) -> bool:
    """Whether searching takes at most some multiple of the square of a text's length.

    No group is repeated that holds an alternative or a quantifier, and no alternative repeats more than twice.
    """
    place, groups, before = 0, [_Group()], ""
    while place < len(expression):
        found = _PIECES.match(expression, place)
        if found is None:
            return False
        place, piece = found.end(), str(found.lastgroup)
        if piece == "set":
            place = _end_of_set(expression, place)
        elif piece == "open":
            groups.append(_Group())
        elif piece == "bar":
            groups[-1].next_alternative()
        elif piece == "close":
            closed = groups.pop()
            if not groups:
                return False
            groups[-1].unbounded += closed.most
            groups[-1].closed = closed
        elif piece == "quantifier":
            if before in ("", "open", "bar", "quantifier") or (before == "close" and not groups[-1].repeat(found[0])):
                return False
            groups[-1].unbounded += _is_endless(found[0])
            groups[-1].quantified |= re.fullmatch(r"\{\d+\}", found[0]) is None
        if groups[-1].most > _UNBOUNDED or len(groups) > _DEPTH or place < 0:
            return False
        before = piece
    return len(groups) == 1


class _Group:
    """An open group: the quantifiers without a bound of its alternatives, and whether it matches in several ways."""

    def __init__(self) -> None:
        self.unbounded = self._others = 0
        self.quantified = False
        self.closed: _Group | None = None

    @property
    def most(self) -> int:
        """The quantifiers without a bound of the alternative that has most."""
        return max(self.unbounded, self._others)

    def next_alternative(self) -> None:
        """A bar was read."""
        self._others, self.unbounded = self.most, 0
        self.quantified = True

    def repeat(self, quantifier: str) -> bool:
        """Whether the group that was closed last may have `quantifier` behind it."""
        once = quantifier[0] == "?" or quantifier.rstrip("?") in ("{1}", "{0,1}", "{,1}")
        return once or (self.closed is not None and not self.closed.is_ambiguous)

    @property
    def is_ambiguous(self) -> bool:
        """Whether one text may be matched in several ways, as far as that is seen at a glance."""
        return self.quantified or (self.closed is not None and self.closed.is_ambiguous)


def _is_endless(quantifier: str) -> bool:
    return quantifier[0] in "*+" or re.fullmatch(r"\{\d*,\}\??", quantifier) is not None


def _end_of_set(expression: str, place: int) -> int:
    """Where a set of characters ends that begins before `place`, -1 where it does not; sets may hold sets."""
    depth = 1
    first = place + (expression[place : place + 1] == "^")
    while place < len(expression):
        letter = expression[place]
        if letter == "[":
            depth += 1
        elif letter == "]" and place != first:
            depth -= 1
        place += 2 if letter == "\\" else 1
        if not depth:
            return place
    return -1
