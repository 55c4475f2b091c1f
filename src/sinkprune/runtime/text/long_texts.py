"""Texts of very many characters, whose tokens are counted piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sinkprune.contract.errors import PromptError

_MOST_CHARACTERS = 32
"""The most characters of a text for each token of the context. Text of people has 2 to 5, tables with spaces more."""
_PIECE, _CUT_TOKENS = 1 << 14, 64
"""The characters of a text that are counted at a time, and the tokens that may be due to the cuts of a piece."""


def check_long_texts(texts: Sequence[str], most: int, encoded: Callable[[str], Sequence[int]]) -> None:
    """Raise `PromptError` for texts of clearly more than `most` tokens; `encoded` returns the tokens of a text."""
    characters = sum(map(len, texts))
    if characters > _MOST_CHARACTERS * most:
        raise PromptError(
            f"the prompt has {characters} characters, expected at most {_MOST_CHARACTERS} for each of the "
            f"model's {most} positions. Shorten it."
        )
    tokens = 0
    for text in texts:
        for start in range(0, len(text), _PIECE):
            # A word that a piece begins or ends in may have more tokens than it has as a whole.
            tokens += max(0, len(encoded(text[start : start + _PIECE])) - _CUT_TOKENS)
            if tokens > most:
                raise PromptError(
                    f"the prompt is too long: its text has more than the model's {most} positions. Shorten it."
                )
