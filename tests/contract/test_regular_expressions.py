"""Regular expressions of tokenizers: published ones are accepted, slow ones are rejected."""

from __future__ import annotations

import time

import pytest
from tokenizers import Regex, pre_tokenizers

from sinkprune.contract.text.regular_expressions import PUBLISHED, is_quick

PLAIN = [r" {2,}", "▁", r"\d{1,3}", r"\p{N}", r"[^\s]+", r"\n|\r\n", r"[一-龥぀-ゟ]+", r"ab[cd]\d*"]
ENDLESS = ["(a+)+$", "(a|a)*b", "(?=(a+)+b)", "a*(?!c)[bc]", "a*b", "a?" * 30 + "a" * 30, "a+*", "a{2,}*b", r"(a)\1"]
ENDLESS += [r"(?<x>a)\k<x>", r"\g<0>", "(?~a)", "(" * 30 + "a" + ")" * 30, "[[a-z]&&[^b]]+"]
BROKEN = ["", "[a", "(a", "a)", "*a", "(?#x)a", "a{", "|*", "|a", "a|", "a||b", "\\", "^a", "a$", "a]"]
LONG = ["a" * 40_000, " " * 40_000, "a" * 40_000 + "c", " \n" * 20_000, "Aa" * 20_000, "!" * 40_000, "1" * 40_000]


@pytest.mark.parametrize("expression", [*sorted(PUBLISHED), *PLAIN])
def test_expressions_that_are_taken_search_quickly(expression: str) -> None:
    assert is_quick(expression)
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    for text in LONG:
        began = time.process_time()
        split.pre_tokenize_str(text)
        assert time.process_time() - began < 1


@pytest.mark.parametrize("expression", [*ENDLESS, *BROKEN])
def test_slow_expressions_are_rejected(expression: str) -> None:
    assert not is_quick(expression)
