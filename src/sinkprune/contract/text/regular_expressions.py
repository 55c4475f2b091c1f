"""Accept the regular expressions of tokenizers that are searched in linear time.

Tokenizers search with Oniguruma, which backtracks: a short expression can take longer than anybody waits. Expressions
of published tokenizers are accepted by their text. All others must be rows of characters and sets, of which the last
may be repeated.
"""

from __future__ import annotations

import re

PUBLISHED = frozenset(
    {
        # GPT-2, in slow and in fast tokenizers
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
"""Expressions of published tokenizers. After a repetition, the rest either cannot fail or backs up one step."""
_PIECE = r"\\p\{\^?\w{1,40}\}|\\[sSdDwWnrt]|\\[^\w\s]|\[\^?(?:\\.|[^\\\[\]])+\]|[^\\()\[\]{}*+?|^$]"
_ROW = rf"(?:{_PIECE})+(?:[*+?]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}})?"
"""Characters and sets in a row, of which the last may be repeated. After it nothing can fail."""
_ROWS = re.compile(rf"{_ROW}(?:\|{_ROW})*")


def is_quick(expression: str) -> bool:
    """Return whether the expression is known to search a text in linear time."""
    return expression in PUBLISHED or _ROWS.fullmatch(expression) is not None
