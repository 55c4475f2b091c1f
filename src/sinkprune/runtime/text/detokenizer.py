"""Token ids to text, as they come."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_HALF = "\ufffd"


class Detokenizer:
    """Turns token ids into text, piece by piece. A character of several tokens waits until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self.text = ""
        """What all pieces given so far add up to."""

    def add(self, token: int) -> str:
        """What `token` adds to the text; empty while a character is not whole."""
        self._ids.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token) or ""
        except Exception:
            # tokenizers has no class for it: bytes that make no character changed how what stands before them reads.
            piece = self._rest()
            if piece.endswith(_HALF):
                return ""
            self._stream = DecodeStream(skip_special_tokens=True)
            self._stream.step(self._tokenizer, token)
        self.text += piece
        return piece

    def end(self) -> str:
        """What waited for tokens that will not come."""
        piece = self._rest()
        self.text += piece
        return piece

    def _rest(self) -> str:
        """What all tokens say beyond `text`."""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole[len(self.text) :]
