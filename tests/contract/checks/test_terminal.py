"""Control characters in untrusted text are escaped."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.contract.checks import escaped
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.errors import UsageError


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left_and_all_else_is(text: str) -> None:
    found = escaped(text)
    assert not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in found)
    if all(character.isprintable() for character in text):
        assert found == text


def test_escape_sequences_are_written_as_in_python() -> None:
    assert escaped("a\x1b[2J\x9b1m\r\nb\u202e\udcff") == r"a\x1b[2J\x9b1m\r\nb\u202e\udcff"
    assert escaped("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
    # Joiners and right-to-left letters stay.
    joined = "\U0001f469\u200d\U0001f4bb \u0645\u06cc\u200c\u0631"
    assert escaped(joined) == joined


def test_an_error_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    def body(arguments: object) -> None:
        raise UsageError("'\x1b]0;owned\x07photo\n.jpg' is missing.")

    assert run_command(body, None) == 2
    assert capsys.readouterr().err == "error: '\\x1b]0;owned\\x07photo\\n.jpg' is missing.\n"
