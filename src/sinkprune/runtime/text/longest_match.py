"""How long a text that matches a regular expression may be, found without the tokens of a model."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import Any

from sinkprune.runtime.text.answer_form import LIMITS, load_llguidance, written_grammar

# llguidance needs about a millisecond for each question about a length, and more for a longer one.
_SEARCHED = 256
_CHARACTER_BYTES = 4
_NOT_ASCII = r"(?s:.)*[^\x00-\x7f](?s:.)*"
NO_MATCH = "NoExtensionBias"
"""How llguidance's error starts where no text matches. Other errors, as of too much work, leave the question open."""


@lru_cache(maxsize=64)
def longest_match(regex: str, most: int) -> int:
    """Return the most bytes of a text that matches a checked `regex` as a whole, as far as they are below `most`.

    Return `most` for an expression without a bound, and for one of more than 256 characters. Characters outside ASCII
    count as 4 bytes, and then so do all others.
    """
    searched = min(most, _SEARCHED)
    if not searched or _may_match(regex, _longer_than(searched - 1)):
        return most
    characters = bisect_left(range(searched), True, key=lambda count: not _may_match(regex, _longer_than(count)))
    return min(most, characters * (_CHARACTER_BYTES if _may_match(regex, _NOT_ASCII) else 1))


def _longer_than(characters: int) -> str:
    return f"(?s:.){{{characters + 1},}}"


def _may_match(*regexes: str) -> bool:
    """Return whether a text may match all of the `regexes` as a whole: False only if none does."""
    library = load_llguidance()
    terminal = " & ".join(f"/{library.regex_to_lark(regex, 'd')}/" for regex in regexes)
    grammar, limits = written_grammar(f"start: TEXT\nTEXT: {terminal}"), library.LLParserLimits(**LIMITS)
    matcher = library.LLMatcher(_bytes(), grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    return not matcher.get_error().startswith(NO_MATCH)


@lru_cache(maxsize=1)
def _bytes() -> Any:
    """Return llguidance's tokenizer that has a token for each byte."""
    return load_llguidance().LLTokenizer("byte")
