"""Regular expressions of tokenizers: which can be searched for in a text without taking for ever.

Tokenizers search with Oniguruma, which tries one way after another, and an expression of a few letters can have more
ways than anybody can try. So those of published tokenizers are known by their text, and of all others only such are
taken as cannot go back: a row of characters or sets, of which the last may be repeated.
"""

from __future__ import annotations

import re

PUBLISHED = frozenset(
    {
        # GPT-2, as slow and as fast tokenizers write it
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # CLIP
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        # Qwen2, 2.5 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+",
        # Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+",
        # cl100k
        r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
        r"\s+(?!\S)|\s+",
        # Tekken (Mistral NeMo, Pixtral)
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # o200k
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Expressions of published tokenizers: what follows a repetition in them either cannot fail or is a step back."""
_PIECES = re.compile(
    r"(?P<escape>\\[pP]\{\^?\w{1,40}\}|\\x\{[0-9A-Fa-f]{1,6}\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\[^\dgkKAzZGbByYRX])"
    r"|(?P<bar>\|)|(?P<quantifier>[*+?][?+]?|\{\d{0,4}(?:,\d{0,4})?\}\??)|(?P<set>\[)|(?P<letter>[^\\()\[\]{}*+?|^$])",
    re.DOTALL,
)
"""What other expressions are made of: neither groups, nor looks ahead, nor references to their own parts."""


def is_quick(expression: str) -> bool:
    """Whether searching a text takes no more than some multiple of its length."""
    return expression in PUBLISHED or _cannot_go_back(expression)


def _cannot_go_back(expression: str) -> bool:
    """Whether of each alternative's pieces only the last has a quantifier: behind it nothing can fail."""
    place, before = 0, "bar"
    while place < len(expression):
        found = _PIECES.match(expression, place)
        if found is None:
            return False
        place, piece = found.end(), str(found.lastgroup)
        if piece == "set":
            place = _end_of_set(expression, place)
        empty = before == "bar" and piece in ("bar", "quantifier")
        if empty or (before == "quantifier" and piece != "bar") or place < 0:
            return False
        before = piece
    return before != "bar"


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
