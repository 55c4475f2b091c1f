"""The text of an answer: token ids in, pieces of text out, until a stop token or a stop string ends the answer."""

from __future__ import annotations

from collections.abc import Container, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\ufffd"


class AnswerText:
    """Turns the tokens of an answer into text, piece by piece."""

    def __init__(
        self, tokenizer: Tokenizer, stop_tokens: Container[int], stop_strings: Sequence[str], min_tokens: int
    ) -> None:
        """Start an empty text. The first `min_tokens` tokens never end it."""
        self._tokens, self._strings = Detokenizer(tokenizer), StopStrings(stop_strings)
        self._stop_tokens, self._ignored = stop_tokens, min_tokens
        self.text = ""
        """All pieces so far."""
        self.stopped = False
        """Whether a stop token or a stop string ended the answer."""

    def add(self, token: int) -> str:
        """Return what `token` adds to the text: nothing while a character or a stop string is incomplete."""
        may_stop, self._ignored = self._ignored <= 0, self._ignored - 1
        if may_stop and token in self._stop_tokens:
            self.stopped = True
            return ""
        piece = self._tokens.add(token)
        return self._record(self._strings.add(piece) if may_stop else piece)

    def end(self) -> str:
        """Return the text that was held back. No token follows."""
        return self._record(self._strings.add(self._tokens.end()) + self._strings.end())

    def _record(self, piece: str) -> str:
        self.stopped = self.stopped or self._strings.found
        self.text += piece
        return piece


class Detokenizer:
    """Turns token ids into text, piece by piece. A character of several tokens waits until it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self.text = ""
        """All pieces so far."""

    def add(self, token: int) -> str:
        """Return what `token` adds to the text: nothing while a character is incomplete."""
        self._ids.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token) or ""
        except Exception:
            # tokenizers raises a plain Exception where invalid bytes change how the text before them decodes.
            piece = self._rest()
            if piece.endswith(_REPLACEMENT):
                return ""
            self._stream = DecodeStream(skip_special_tokens=True)
            self._stream.step(self._tokenizer, token)
        self.text += piece
        return piece

    def end(self) -> str:
        """Return the text of tokens that waited for others. No token follows."""
        piece = self._rest()
        self.text += piece
        return piece

    def _rest(self) -> str:
        """The text of all tokens after `text`."""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole[len(self.text) :]


class StopStrings:
    """Passes text on until it contains one of several strings, and leaves out that string and all text after it.

    Text that may be the beginning of a string is held back until more text decides. The result does not depend on how
    the text is cut into pieces. The string that is complete first ends the answer; of several that end at the same
    character, the longest does.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Look for `strings`, of which none may be empty. Without strings, all text passes at once."""
        self._strings, self._held = tuple(strings), ""
        self.found = False
        """Whether the text had one of the strings."""

    def add(self, piece: str) -> str:
        """Return the text, up to and with `piece`, that belongs to no string; nothing after a string was found."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(text.find(one) + len(one), -len(one)) for one in self._strings if one in text]
        if ends:
            end, length = min(ends)
            self.found, self._held = True, ""
            return text[: end + length]
        held = max((_overlap(text, one) for one in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return the text that was held back. No text follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `string`, but not all of it."""
    most = min(len(text), len(string) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(string[:length])), 0)
