"""A user's words to token ids: chat template and tokenizer, safe against special tokens typed by the user."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sinkprune.contract.errors import BundleError, PromptError
from sinkprune.contract.files.untrusted import UnreadableError
from sinkprune.contract.manifest import Tokens
from sinkprune.contract.text.tokenizer_json import check_tokenizer_json
from sinkprune.runtime.text.chat_template import ChatTemplate

_Message = dict[str, Any]
"""A turn of a conversation, as chat templates take it."""


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation around one image or several."""

    texts: list[list[int]]
    """Token ids before each image, and behind the last."""

    @property
    def text_tokens(self) -> int:
        """How many text tokens the prompt has; images are not counted."""
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class _Special:
    """A special token, and the two marks that keep the template's apart from the user's."""

    identity: int
    token: AddedToken
    stand_in: str
    """What the tokenizer sees where the template wrote the token."""
    quoted: str
    """What the template sees where the user typed it."""


class PromptEncoder:
    """Renders and encodes prompts with a checkpoint's own template and tokenizer.

    A template writes special tokens as text, and a user may type the same text. So each special token the template
    writes is exchanged for a stand-in that nobody can type, and the tokenizer is told to read its own special
    tokens as plain text: a typed ``<image>`` is letters in brackets, never a second image.
    """

    def __init__(self, tokenizer_json: bytes, chat_template: bytes, tokens: Tokens) -> None:
        """From what a bundle's tokenizer.json and chat template hold; raises `BundleError`."""
        self.tokenizer = _read_tokenizer(tokenizer_json)
        self._template = ChatTemplate(chat_template)
        self._tokens = tokens
        self._specials = _specials(self.tokenizer, tokens.image)
        self._encoder = _parsed(tokenizer_json)
        self._encoder.encode_special_tokens = True
        # An image token that the checkpoint does not mark special is no less one.
        self._encoder.add_special_tokens(
            [AddedToken(special.token.content, special=True, normalized=False) for special in self._specials]
        )
        self._encoder.add_tokens([_stand_in(special) for special in self._specials])
        self._identities = {
            self._encoder.token_to_id(special.stand_in): special.identity for special in self._specials
        }
        self._image = next(
            self._encoder.token_to_id(special.stand_in)
            for special in self._specials
            if special.identity == tokens.image
        )

    def encode(self, texts: Sequence[str], within: Sequence[Sequence[str]] = (), system: str | None = None) -> Prompt:
        """The conversation of one user turn: `texts`, with an image between each two of them, after `system`.

        `within` has for each image the texts that its groups stand between, in the template's words, or none where
        it is in one piece (`VisualLayout.texts`); such an image stands at several places of the prompt.
        `sinkprune.runtime.steps.request.check_texts` has refused texts that say nothing. Raises `BundleError` where
        the template does not write every image, and `PromptError` where it writes no system message.
        """
        pieces = [own or ("", "") for own in within] or [("", "")] * (len(texts) - 1)
        images = sum(len(own) - 1 for own in pieces)
        rendered = self._taken_apart(self._render([*self._system(system), _user(self._content(texts))]), pieces)
        # As in transformers' processors: where the template writes the first special token, the tokenizer adds none.
        bos = [special.stand_in for special in self._specials if special.token.content == self._tokens.bos]
        adds = not bos or not rendered.startswith(bos[0])
        with _refused("cannot encode the prompt"):
            encoded = self._encoder.encode(rendered, add_special_tokens=adds).ids
        found = [place for place, token in enumerate(encoded) if token == self._image]
        if len(found) != images:
            raise BundleError(
                f"the bundle's chat template writes {len(found)} images into a prompt with {images}. "
                "Mend the checkpoint's chat template and export it again."
            )
        ids = [self._identities.get(token, token) for token in encoded]
        starts = [0, *(place + 1 for place in found)]
        return Prompt([ids[start:end] for start, end in zip(starts, [*found, len(ids)], strict=True)])

    def _taken_apart(self, rendered: str, pieces: Sequence[Sequence[str]]) -> str:
        """`rendered` with each image at as many places as the texts of its piece stand around."""
        image = next(special.stand_in for special in self._specials if special.identity == self._tokens.image)
        before, *behind = rendered.split(image)
        if len(behind) != len(pieces):
            return rendered
        for own, text in zip(pieces, behind, strict=True):
            before += self._written(image.join(own)) + text
        return before

    def _written(self, text: str) -> str:
        """`text` of the template's own, with stand-ins for the special tokens it writes."""
        for special in self._specials:
            text = text.replace(special.token.content, special.stand_in)
        return text

    def _quoted(self, text: str) -> str:
        """`text` of the user's, with the special tokens that it spells marked as plain text."""
        for special in self._specials:
            text = text.replace(special.token.content, special.quoted)
        return text

    def _system(self, text: str | None) -> list[_Message]:
        """The system message `text` as the template takes it, in parts or as a str; none for None."""
        if text is None:
            return []
        number, forms = str(secrets.randbits(64)), (_in_parts, _as_text)
        for form in forms:
            try:
                rendered = self._render([form(number), _user([{"type": "image"}, {"type": "text", "text": "?"}])])
            except BundleError:
                continue
            # A template that takes no parts writes them as Python does, in quotes.
            before, found, _ = rendered.partition(number)
            if found and not before.endswith(("'", '"')):
                return [form(self._quoted(text))]
        raise PromptError(
            "the checkpoint's chat template has no place for a system message. Leave out the system message, and put "
            "its text before the question."
        )

    def _content(self, pieces: Sequence[str]) -> list[dict[str, str]]:
        """A user turn's content: an image between each two of `pieces`."""
        quoted = [self._quoted(piece) for piece in pieces]
        if any(quoted[:-1]) and not self._keeps_order():
            # Such a template puts all images first; within the text they stand where they belong.
            image = next(special.stand_in for special in self._specials if special.identity == self._tokens.image)
            return [{"type": "text", "text": image.join(quoted)}]
        content: list[dict[str, str]] = []
        for number, piece in enumerate(quoted):
            content += [{"type": "image"}] if number else []
            content += [{"type": "text", "text": piece}] if piece else []
        return content

    def _keeps_order(self) -> bool:
        """Whether the template writes text before an image that comes before it."""
        text = str(secrets.randbits(64))
        rendered = self._render([_user([{"type": "text", "text": text}, {"type": "image"}])])
        image = next(special.stand_in for special in self._specials if special.identity == self._tokens.image)
        return text in rendered.partition(image)[0]

    def _render(self, messages: list[_Message]) -> str:
        rendered = self._written(self._template.render(messages, self._tokens.bos, self._tokens.eos))
        for special in self._specials:
            rendered = rendered.replace(special.quoted, special.token.content)
        return rendered


def _user(content: list[dict[str, str]]) -> _Message:
    return {"role": "user", "content": content}


def _in_parts(text: str) -> _Message:
    return {"role": "system", "content": [{"type": "text", "text": text}]}


def _as_text(text: str) -> _Message:
    return {"role": "system", "content": text}


def _read_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """A bundle's tokenizer; raises `BundleError` for one that is damaged, or could end the process."""
    try:
        check_tokenizer_json(tokenizer_json)
    except UnreadableError as error:
        raise BundleError(f"the bundle's tokenizer.json {error}. Export the checkpoint again.") from error
    return _parsed(tokenizer_json)


def _parsed(tokenizer_json: bytes) -> Tokenizer:
    with _refused("is no valid tokenizer"):
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    # Prompts are as long as they are.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Makes a `BundleError` of what the tokenizers library raises: of many kinds, panics among them."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise BundleError(f"the bundle's tokenizer.json {what}: {reason}. Export the checkpoint again.") from error


def _specials(tokenizer: Tokenizer, image_token: int) -> list[_Special]:
    """Longest first, so that no token is taken for a part of another."""
    # Digits only, so that a template may change the case of what the user wrote.
    nonce = secrets.randbits(64)
    added = [
        (identity, token)
        for identity, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or identity == image_token
    ]
    if image_token not in dict(added):
        raise BundleError(f"the bundle's tokenizer has no image token {image_token}. Export the checkpoint again.")
    return [
        _Special(identity, token, f"\ue000{nonce}+{identity}\ue001", f"\ue000{nonce}-{identity}\ue001")
        for identity, token in sorted(added, key=lambda item: -len(item[1].content))
    ]


def _stand_in(special: _Special) -> AddedToken:
    """Splits the text as the special token does, but is none itself, so that it is always recognised."""
    token = special.token
    return AddedToken(
        special.stand_in,
        special=False,
        normalized=False,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )
