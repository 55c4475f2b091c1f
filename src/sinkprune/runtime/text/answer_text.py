"""The text of one answer: token ids in, pieces of text out, until a stop token or a stop string ends it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from tokenizers import Tokenizer

from sinkprune.runtime.text.detokenizer import Detokenizer
from sinkprune.runtime.text.stop_strings import StopStrings


class AnswerText:
    """Turns the tokens of an answer into text, piece by piece."""

    def __init__(
        self, tokenizer: Tokenizer, stop_tokens: Container[int], stop_strings: Sequence[str], min_tokens: int
    ) -> None:
        """The first `min_tokens` tokens end nothing, whatever they are."""
        self._tokens, self._strings = Detokenizer(tokenizer), StopStrings(stop_strings)
        self._stop_tokens, self._ignored = stop_tokens, min_tokens
        self.text = ""
        """All pieces so far."""
        self.stopped = False
        """Whether a stop token or a stop string ended the answer."""

    def add(self, token: int) -> str:
        """Return what `token` adds to the text; empty while a character or a stop string is not complete."""
        may_stop, self._ignored = self._ignored <= 0, self._ignored - 1
        if may_stop and token in self._stop_tokens:
            self.stopped = True
            return ""
        piece = self._tokens.add(token)
        return self._said(self._strings.add(piece) if may_stop else piece)

    def end(self) -> str:
        """Return the text that was held back, because no more tokens come."""
        return self._said(self._strings.add(self._tokens.end()) + self._strings.end())

    def _said(self, piece: str) -> str:
        self.stopped = self.stopped or self._strings.found
        self.text += piece
        return piece
