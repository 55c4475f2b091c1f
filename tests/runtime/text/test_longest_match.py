"""The longest text that matches a regular expression, for the tokens that a deadline leaves time for."""

from __future__ import annotations

import pytest

from sinkprune.runtime.text.longest_match import longest_match


@pytest.mark.parametrize(
    ("regex", "most"),
    [
        ("[0-9]", 1),
        ("a{2,5}|b", 5),
        ("(red|green|blue), [0-9]{1,3}", 10),
        ("[a-z]{1,127}", 127),
        ("a/b", 3),
        ("(?:)", 0),
        # As llguidance reads them; Python's `re` would not.
        ("[[:alpha:]]{2}", 2),
        ("\\p{Lu}{2}", 8),
        ("é{3}", 12),
    ],
)
def test_a_bound_is_the_bytes_of_the_longest_text(regex: str, most: int) -> None:
    assert longest_match(regex, 128) == most
    assert longest_match(regex, 2) == min(most, 2)


@pytest.mark.parametrize("regex", ["[0-9]+", ".*", "(a|b)*c{2}", "[a-z]{128}", "é{40}", "([a-z]{1,20} ){1,20}"])
def test_no_bound_below_the_limit_is_the_limit(regex: str) -> None:
    assert longest_match(regex, 128) == 128


def test_far_bounds_are_not_searched() -> None:
    assert longest_match("[a-z]{256}", 4096) == 4096
    assert longest_match("[a-z]{255}", 4096) == 255
