"""The text of an answer, taken apart into content and calls of tools, piece by piece."""

from __future__ import annotations

from typing import NamedTuple

from sinkprune.runtime.text.answer_text import StopStrings
from sinkprune.runtime.text.tools import ARGUMENTS_BEFORE, BEGIN, CALL_AFTER, NAME_BEFORE


class AnswerPart(NamedTuple):
    """A part of an answer: content, the start of a call, or a part of its arguments."""

    text: str
    """Content, or JSON of a call's arguments; empty at the start of a call."""
    call: int | None = None
    """The number of the call, from 0; None for content."""
    name: str = ""
    """The function's name at the start of its call."""


_CONTENT, _HEAD, _NAME, _ARGUMENTS = range(4)
_UNTIL = ((BEGIN, f"\n{BEGIN}"), (NAME_BEFORE,), (ARGUMENTS_BEFORE,), (CALL_AFTER,))
"""The texts that end each part."""


class ToolAnswerReader:
    """Takes the text of an answer apart. The result does not depend on how the text is cut into pieces.

    `Tools.grammar` describes the text. A line end before a call is no content, because templates write one there.
    Arguments of a call that was cut off may be incomplete.
    """

    def __init__(self) -> None:
        """Start an empty answer."""
        self.calls = 0
        """The number of calls that have a name."""
        self._kind, self._until, self._name = _CONTENT, StopStrings(_UNTIL[_CONTENT]), ""

    def add(self, piece: str) -> list[AnswerPart]:
        """Return what `piece` adds to the answer: nothing while a text between the parts is incomplete."""
        parts: list[AnswerPart] = []
        # StopStrings drops what follows a string in the same piece.
        for character in piece:
            text = self._until.add(character)
            if self._kind == _CONTENT and text:
                parts.append(AnswerPart(text))
            elif self._kind == _NAME:
                self._name += text
            elif self._kind == _ARGUMENTS and text:
                parts.append(AnswerPart(text, self.calls - 1))
            if self._until.found:
                if self._kind == _NAME:
                    parts.append(AnswerPart("", self.calls, self._name))
                    self.calls, self._name = self.calls + 1, ""
                self._kind = (self._kind + 1) % len(_UNTIL)
                self._until = StopStrings(_UNTIL[self._kind])
        return _joined(parts)

    def end(self) -> list[AnswerPart]:
        """Return the content that was held back. No text follows, and no content follows a call."""
        text = self._until.end()
        return [AnswerPart(text)] if text and self._kind == _CONTENT and not self.calls else []


def _joined(parts: list[AnswerPart]) -> list[AnswerPart]:
    """Return the parts with neighbours of the same kind as one."""
    joined: list[AnswerPart] = []
    for part in parts:
        if joined and joined[-1].call == part.call and not part.name and not joined[-1].name:
            joined[-1] = joined[-1]._replace(text=joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined
