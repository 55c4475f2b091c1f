"""The text of an answer, as its tokens come."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class AnswerText:
    """Turns token ids into text, piece by piece. A character of several tokens waits until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self.text = ""
        """All pieces so far."""

    def add(self, token: int) -> str:
        """What `token` adds to the text; empty while a character is not whole."""
        self._ids.append(token)
        return self._added(self._stream.step(self._tokenizer, token) or "")

    def end(self) -> str:
        """What waited for tokens that will not come."""
        return self._added(self._tokenizer.decode(self._ids, skip_special_tokens=True)[len(self.text) :])

    def _added(self, piece: str) -> str:
        self.text += piece
        return piece
