"""Strings that end an answer when its text contains one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until it contains one of several strings; the string itself and all after it are left out.

    Text that may be the beginning of a string is held back until more text shows whether it is. How the text is cut
    into pieces changes nothing: the string that is complete first ends the answer, and of those that are complete at
    the same character the longest.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Without any of `strings` all text is passed on at once; none of them may be empty."""
        self._strings, self._held = tuple(strings), ""
        self.found = False
        """Whether the text had one of the strings."""

    def add(self, piece: str) -> str:
        """Return the text that `piece` shows to be none of a string's; empty after a string was found."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(text.find(one) + len(one), -len(one)) for one in self._strings if one in text]
        if ends:
            end, length = min(ends)
            self.found, self._held = True, ""
            return text[: end + length]
        held = max((_beginning(text, one) for one in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return the text that was held back, because no more will come."""
        text, self._held = self._held, ""
        return text


def _beginning(text: str, string: str) -> int:
    """How many characters at the end of `text` are the beginning of `string`, but not all of it."""
    most = min(len(text), len(string) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(string[:length])), 0)
