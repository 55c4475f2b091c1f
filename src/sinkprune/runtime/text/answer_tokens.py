"""The tokens of an answer: sampled from logits, and turned into text until a stop token or a stop string."""

from __future__ import annotations

import math
import re
import sys
from codecs import getincrementaldecoder
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from sinkprune.contract.checks import RealNumber, WholeNumber
from sinkprune.contract.errors import BundleError, NumericsError
from sinkprune.contract.precision import Array

if TYPE_CHECKING:
    from sinkprune.runtime.text.penalties import Penalties

TEMPERATURE = RealNumber("temperature", 0.0, sys.float_info.max, "0 (greedy) or a larger finite number")
TOP_P = RealNumber("top_p", math.nextafter(0.0, 1.0), 1.0, "more than 0 and at most 1")
REPETITION_PENALTY = RealNumber("repetition_penalty", 0.01, 100.0)
PRESENCE_PENALTY = RealNumber("presence_penalty", -2.0, 2.0)
FREQUENCY_PENALTY = RealNumber("frequency_penalty", -2.0, 2.0)
PENALTIES = ((REPETITION_PENALTY, 1.0), (PRESENCE_PENALTY, 0.0), (FREQUENCY_PENALTY, 0.0))
"""The options for `Penalties`, and the value of each that changes nothing."""
# numpy's generator keeps 128 bits of a seed.
SEED = WholeNumber("seed", 0, 2**128 - 1)
CALL_MARKS = BEGIN, END = "<tool_call>", "</tool_call>"
"""The texts around a call of a tool. Many tokenizers have a token for each."""


class Sampler:
    """Samples token ids. The same seed gives the same tokens."""

    def __init__(
        self,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        penalties: Penalties | None = None,
    ) -> None:
        """Sample greedily at `temperature` 0. Numbers are within `TEMPERATURE`, `TOP_P` and `SEED`."""
        self._temperature, self._top_p, self._penalties = temperature, top_p, penalties
        self._generator = np.random.default_rng(seed)

    @property
    def is_greedy(self) -> bool:
        """Whether a token follows from the largest of its logits alone."""
        return self._temperature == 0.0 and self._penalties is None

    def __call__(self, logits: Array, allowed: Array | None = None) -> int:
        """Return a token id for logits [vocab], ties to the lower id; raises `NumericsError` if any is not finite.

        Only tokens where the booleans `allowed` [vocab] are true are sampled; at least one must be. None allows all.
        """
        check_finite(logits)
        if self._penalties is not None:
            logits = self._penalties(logits)
        token = self._sampled(logits if allowed is None else np.where(allowed, logits, -np.inf))
        if self._penalties is not None:
            self._penalties.add(token)
        return token

    def _sampled(self, logits: Array) -> int:
        if self._temperature == 0.0:
            return int(np.argmax(logits))
        below_best = logits.astype(np.float64) - logits.max()
        # At the lowest temperatures all but the best become exp(-inf) = 0.
        with np.errstate(over="ignore"):
            probabilities = np.exp(below_best / self._temperature)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        # The smallest set whose probability reaches top_p; never empty.
        before = np.cumsum(probabilities[order]) - probabilities[order]
        nucleus = order[before < self._top_p]
        weights = probabilities[nucleus] / probabilities[nucleus].sum()
        return int(self._generator.choice(nucleus, p=weights))


def check_finite(logits: Array) -> None:
    """Raise `NumericsError` if any of the logits is not finite."""
    if not np.isfinite(logits).all():
        raise not_finite()


def not_finite() -> NumericsError:
    """Return the error for logits that are not finite."""
    return NumericsError(
        "the model's logits are not finite. If the bundle is fp16, its values may exceed that type; "
        "export it with --precision fp32. openvino-gpu computes in fp16 unless --compute is fp32."
    )


_PRINTED = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The bytes that the letters of byte-level tokens stand for, as in GPT-2's vocabulary."""
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The tokens of sentencepiece that stand for a byte."""


@contextmanager
def tokenizer_errors(problem: str) -> Iterator[None]:
    """Raise a `BundleError` for errors of the tokenizers library, which are of many kinds and may be panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise BundleError(f"the bundle's tokenizer.json {problem}: {reason}. Export the checkpoint again.") from error


class AnswerText:
    """Turns the tokens of an answer into text, piece by piece.

    A character of several tokens waits until it is complete. Bytes that no character has become U+FFFD. The text
    never has a character that the last token left incomplete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_tokens: Container[int] = (),
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """Start an empty text. The first `min_tokens` tokens never end it."""
        self._bytes, self._characters = TokenBytes(tokenizer), getincrementaldecoder("utf-8")("replace")
        self._strings = StopStrings(stop_strings)
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
        piece = self._characters.decode(self._bytes.add(token))
        return self._record(self._strings.add(piece) if may_stop else piece)

    def end(self) -> str:
        """Return the text that was held back, without an incomplete character. No token follows."""
        return self._record(self._strings.end())

    def _record(self, piece: str) -> str:
        self.stopped = self.stopped or self._strings.found
        self.text += piece
        return piece


class TokenBytes:
    """The bytes that tokens write into a text, one token after the other.

    Special tokens write none. A character may be spread over several tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._byte_level, self._byte_fallback = b'"ByteLevel"' in decoder, b'"ByteFallback"' in decoder
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._first = True

    def add(self, token: int) -> bytes:
        """Return what `token` writes as the next one."""
        found = self.peek(token)
        self._first = self._first and token in self._special
        return found

    def peek(self, token: int) -> bytes:
        """Return what `token` would write as the next one."""
        word = self._tokenizer.id_to_token(token)
        if word is None or token in self._special:
            return b""
        alone = self._decoded(token)
        if self._byte_fallback and (byte := _FALLBACK.fullmatch(word)):
            found = bytes.fromhex(byte[1])
        elif self._byte_level:
            try:
                found = bytes(_BYTES[character] for character in word)
            except KeyError:
                found = word.encode()
        else:
            # A decoder may take a space from the first token only.
            found = self._decoded(token, token)[len(alone) :].encode()
        if self._first:
            found = found[max(0, len(found.decode(errors="replace")) - len(alone)) :]
        return found

    def _decoded(self, *tokens: int) -> str:
        with tokenizer_errors("cannot decode an answer"):
            text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


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
