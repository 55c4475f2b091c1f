"""Which regular expressions a tokenizer may search with: those of published ones, and none that take for ever."""

from __future__ import annotations

import pytest

from sinkprune.contract.regular_expressions import is_quick

PUBLISHED = {
    "GPT-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "CLIP": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "Qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "DeepSeek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}]+| ?[\p{P}]+""",
    "Bloom": r" ?[^(\s|[.,!?…。、])]+",
    "Kimi": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+(?i:'s|'t)?",
    "thousands": r"\d{1,3}(?=(?:\d{3})*\b)",
    "Chinese": r"[一-龥぀-ゟ]+",
    "blanks": r" {2,}",
    "text": "▁",
}
ENDLESS = [
    r"(a+)+$",
    r"(a|a)*b",
    r"(a|aa)+b",
    r"(a?a)*b",
    r"(a*)*",
    r"(a+){2,}b",
    r"(a+){5}b",
    r"(((a+)))*b",
    r"((a+)|b)*c",
    r"(?:(?:a|b))*c",
    r"(?=(a+)+b)",
    r"a+*",
    r"a{2,}*b",
    r"a{2,}+b",
    r"\s*\s*\s*x",
    r"(a)\1",
    r"(?<x>a)\k<x>",
    r"\g<0>",
    r"(?~a)",
    "(" * 30 + "a" + ")" * 30,
]
BROKEN = ["[a", "(a", "a)", "*a", "(?#x)a", "a{", "|*", "\\"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers_search_quickly(name: str) -> None:
    assert is_quick(PUBLISHED[name])


@pytest.mark.parametrize("expression", [*ENDLESS, *BROKEN])
def test_what_may_take_for_ever_is_told(expression: str) -> None:
    assert not is_quick(expression)
