"""Prompts as token ids: chat template and tokenizer, safe against special tokens that a user types.

Templates are Jinja programs of checkpoints. They are rendered as transformers does, in Jinja's sandbox, which keeps
them from running code and from reading files. It bounds neither their time nor their memory.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import creation_checks_options, format_value, type_name
from sinkprune.contract.errors import BundleError, PromptError, UsageError
from sinkprune.contract.files.untrusted import TEMPLATE_BYTES, TOKENIZER_BYTES, decoded_text
from sinkprune.contract.manifest import CHAT_TEMPLATE, TOKENIZER, PolicyFacts, Tokens
from sinkprune.runtime.text.answer_tokens import CALL_MARKS, tokenizer_errors

if TYPE_CHECKING:
    from sinkprune.runtime.text.template_places import TemplatePlaces
    from sinkprune.runtime.text.tools import ToolCall, Tools

_REASON = 300


class ChatTemplate:
    """A checkpoint's chat template."""

    def __init__(self, source: bytes) -> None:
        """Compile the template's file in UTF-8; raises `BundleError` if it is invalid."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        try:
            # transformers opens the file as text, which translates line ends.
            text = decoded_text(source).replace("\r\n", "\n").replace("\r", "\n")
            self._template = environment.from_string(text)
        except Exception as error:
            # Python's compiler fails in several ways, as for twenty nested loops.
            raise _template_error("is no valid chat template", error) from error

    def render(
        self, messages: list[dict[str, Any]], bos: str, eos: str, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Return the conversation `messages` as text, with the start of an answer.

        `tools` are the functions that the answer may call: data of the template, as the messages are. Raises
        `BundleError` if the template fails.
        """
        variables: dict[str, Any] = {"messages": messages, "add_generation_prompt": True}
        variables |= {"bos_token": bos, "eos_token": eos, **({} if tools is None else {"tools": tools})}
        try:
            rendered = self._template.render(variables)
            rendered.encode()
        except Exception as error:
            # A program may fail in any way.
            raise _template_error("cannot take an image with a question", error) from error
        return rendered


def _template_error(problem: str, error: Exception) -> BundleError:
    reasons = {RecursionError: "it nests too deep", MemoryError: "it takes too much memory"}
    reason = reasons.get(type(error)) or str(error)[:_REASON]
    reason = "".join(letter if letter.isprintable() else " " for letter in reason).removesuffix(".")
    return BundleError(
        f"the bundle's chat_template.jinja {problem}: {reason}. Mend the checkpoint's chat template and export it "
        "again."
    )


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the text of the model in LLaVA's own template. It changes no text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between `generation` and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON, as transformers does. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


_FEW_CHARACTERS = 1 << 16
"""The most characters of a text that is tokenized without being counted before."""
Message = dict[str, Any]
"""A turn of a conversation, as chat templates take it."""
Text = str | tuple[str, ...]
"""The text in one place between pictures: a str, of which "" is none, or a tuple of several text parts."""


def check_text(name: str, text: object) -> None:
    """Reject what is neither a text nor a tuple of texts; raises `PromptError`, which calls it `name`."""
    if isinstance(text, tuple):
        for part in text:
            check_text(name, part)
        return
    if not isinstance(text, str):
        raise PromptError(f"found {type_name(text)} as the {name}, expected a str, as in 'What is this?'.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Halves of surrogate pairs, which stand for bytes that are no text.
        raise PromptError(f"the {name} is not valid UTF-8. Check the terminal's encoding.") from error


def text_parts(text: Text) -> tuple[str, ...]:
    """Return the text parts of one place."""
    return text if isinstance(text, tuple) else (text,) if text else ()


@creation_checks_options
@dataclass(frozen=True)
class Turn:
    """An earlier turn of a conversation."""

    role: str
    """`user` or `assistant`; `tool` for the result of a call."""
    texts: tuple[Text, ...]
    """The texts around the turn's pictures: one before each, and one after the last. A tuple in the place of a str is
    several text parts. The chat template decides where it writes the pictures, and what between text parts."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls after the text of an assistant's turn."""
    tool_call_id: str | None = None
    """The id of the call whose result the text is; None for other roles."""

    @property
    def pictures(self) -> int:
        """The number of pictures in the turn."""
        return len(self.texts) - 1


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation about one image or several."""

    texts: list[list[int]]
    """Token ids before each image, and after the last; negative for a policy's rows that are no text."""

    @cached_property
    def text_tokens(self) -> int:
        """The number of text tokens, without images."""
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class _Special:
    """A special token, and texts that distinguish the template's from the user's."""

    identity: int
    token: AddedToken
    stand_in: str
    """Replaces, for the tokenizer, a token that the template wrote."""
    mark: str
    """Begins what replaces, for the template, a token that the user typed."""

    def quoted(self, length: int) -> str:
        """Return what replaces the first `length` characters of a typed token."""
        return f"{self.mark}{length}\ue001"


class PromptEncoder:
    """Renders and encodes prompts with a checkpoint's own template and tokenizer.

    A template writes special tokens as text, and a user may type the same text. Each special token of the template
    is replaced by a random stand-in, and the tokenizer reads the special tokens' own texts as plain text. A typed
    ``<image>`` is letters in brackets, never a second image.
    """

    def __init__(
        self, tokenizer_json: bytes, chat_template: bytes, tokens: Tokens, policy: PolicyFacts | None = None
    ) -> None:
        """Read the content of a bundle's tokenizer.json and chat template; raises `BundleError`.

        Prompts of a `policy` have its rows that are no text.
        """
        with tokenizer_errors("is no valid tokenizer"):
            self.tokenizer, self._encoder = (Tokenizer.from_buffer(tokenizer_json) for _ in range(2))
        for tokenizer in (self.tokenizer, self._encoder):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._template, self._tokens, self._policy = ChatTemplate(chat_template), tokens, policy
        # Digits only, so that a template may change the case of the user's text.
        nonce = secrets.randbits(64)
        self._specials = _specials(self.tokenizer, tokens.image, nonce)
        self._typed = re.compile(f"\ue000{nonce}-([0-9]+)-([0-9]+)\ue001")
        self._contents = {special.identity: special.token.content for special in self._specials}
        self._beginnings = {
            special.token.content[:length]: special
            for special in self._specials
            for length in range(1, len(special.token.content))
        }
        self.tokenizer = _with_written_marks(self.tokenizer)
        self.image = next(special.stand_in for special in self._specials if special.identity == tokens.image)
        self._encoder.encode_special_tokens = True
        # The image token counts as special, also where the checkpoint does not mark it.
        self._encoder.add_special_tokens(
            [AddedToken(special.token.content, special=True, normalized=False) for special in self._specials]
        )
        # The stand-ins split the text as special tokens do, but are always recognised: they are not special.
        stand_ins = []
        for special in self._specials:
            splits = {name: getattr(special.token, name) for name in ("lstrip", "rstrip", "single_word")}
            stand_ins.append(AddedToken(special.stand_in, special=False, normalized=False, **splits))
        self._encoder.add_tokens(stand_ins)
        self._identities = {
            self._encoder.token_to_id(special.stand_in): special.identity for special in self._specials
        }

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> PromptEncoder:
        """Return the encoder of a bundle's prompts; raises `BundleError`."""
        files = bundle.files[TOKENIZER].read(TOKENIZER_BYTES), bundle.files[CHAT_TEMPLATE].read(TEMPLATE_BYTES)
        return cls(*files, bundle.manifest.tokens, bundle.manifest.policy)

    def encode(
        self,
        texts: Sequence[Text],
        within: Sequence[Sequence[str]] = (),
        system: Text | None = None,
        history: Sequence[Turn] = (),
        tools: Tools | None = None,
        tool_call_id: str | None = None,
    ) -> Prompt:
        """Return a conversation: `system`, the turns of `history`, and a user turn of `texts` around its images.

        The template decides where the images of a turn stand among its texts, as in transformers: LLaVA's writes them
        first. They stay in order.

        `within` has for each image the texts around its groups (`VisualLayout.texts`), or none for an image in one
        piece. An image with such texts stands at several places of the prompt. The template lists the functions of
        `tools`. With `tool_call_id`, `texts` is the result of that call, and no user's turn.
        `sinkprune.runtime.steps.request.check_texts` rejects empty texts before. Raises `BundleError` if the template
        does not write every image, and `PromptError` if it writes no system message, no calls or no
        earlier turns.
        """
        role = "user" if tool_call_id is None else "tool"
        turns = [*history, Turn(role, tuple(texts), tool_call_id=tool_call_id)]
        if history or tools or tool_call_id is not None:
            self.places.check(turns, tools)
        pieces = [own or ("", "") for own in within] or [("", "")] * sum(turn.pictures for turn in turns)
        images = sum(len(own) - 1 for own in pieces)
        messages = [*map(self._message, turns)]
        if system is not None:
            messages.insert(0, self.places.system_message((system,) if isinstance(system, str) else system))
        functions = self.places.quoted_json([*tools.functions]) if tools else None
        rendered = self._split_images(self.render(messages, functions), pieces)
        # As in transformers' processors: where the template writes the first special token, the tokenizer adds none.
        bos = [special.stand_in for special in self._specials if special.token.content == self._tokens.bos]
        adds = not bos or not rendered.startswith(bos[0])
        encoded = self._encoded(rendered, adds=adds)
        ids = [self._identities.get(token, token) for token in encoded]
        image = self._encoder.token_to_id(self.image)
        found = [place for place, token in enumerate(encoded) if token == image]
        if len(found) != images:
            raise BundleError(
                f"the bundle's chat template writes {len(found)} images into a prompt with {images}. Give images in "
                "the user's turns only, or mend the checkpoint's chat template and export it again."
            )
        starts = [0, *(place + 1 for place in found)]
        *before, last = (ids[start:end] for start, end in zip(starts, [*found, len(ids)], strict=True))
        return Prompt([*before, self._policy.completed(last) if self._policy else last])

    def check_length(self, given: Iterable[Text], most: int) -> None:
        """Raise `PromptError` for texts of clearly more than `most` tokens.

        Texts with few characters pass at once. Others are counted piece by piece, because a tokenizer takes minutes
        and gigabytes for a text of 60 MB.
        """
        texts = [part for text in given for part in text_parts(text)]
        if sum(map(len, texts)) > _FEW_CHARACTERS:
            from sinkprune.runtime.text.long_texts import check_long_texts

            check_long_texts(texts, most, self._encoded)

    def question_ids(self, texts: Sequence[Text]) -> list[int]:
        """Return the token ids of a turn's words, without the template; `texts` are around the turn's pictures."""
        words = " ".join(filter(None, chain.from_iterable(map(text_parts, texts))))
        return [self._identities.get(token, token) for token in self._encoded(words)]

    def answer_ids(self, text: str) -> list[int]:
        """Return the token ids that a model generates for an answer of this text, without a stop token.

        Where the tokenizer's decoder takes a space from the start of an answer, models generate one. Raises
        `UsageError` for a text that these tokens do not decode to: the tokenizer may lack characters.
        """
        for written in (f" {text}", text):
            ids = self._encoded(written)
            with tokenizer_errors("cannot decode an answer"):
                found = self.tokenizer.decode(ids, skip_special_tokens=True)
            if not self._identities.keys() & ids and found == text:
                return ids
        raise UsageError(
            f"the model's tokenizer cannot write {format_value(text)} as an answer. Use other characters, as in "
            "composed accents, or other words."
        )

    @property
    def special_ids(self) -> frozenset[int]:
        """The special tokens, which write no text, and the image token."""
        return frozenset(one.identity for one in self._specials if one.token.content not in CALL_MARKS)

    def _encoded(self, text: str, *, adds: bool = False) -> list[int]:
        """Return the encoder's token ids of `text`; `adds` is whether the tokenizer adds special tokens."""
        with tokenizer_errors("cannot encode the prompt"):
            ids: list[int] = self._encoder.encode(text, add_special_tokens=adds).ids
        return ids

    def _split_images(self, rendered: str, pieces: Sequence[Sequence[str]]) -> str:
        """Return `rendered` with each image at as many places as its piece has gaps between texts."""
        before, *rest = rendered.split(self.image)
        if len(rest) != len(pieces):
            return rendered
        for own, text in zip(pieces, rest, strict=True):
            before += self.with_stand_ins(self.image.join(own)) + text
        return before

    def with_stand_ins(self, text: str) -> str:
        """Return the template's `text` with stand-ins for its special tokens."""
        for special in self._specials:
            text = text.replace(special.token.content, special.stand_in)
        return text

    def quoted(self, text: str) -> str:
        """Return the user's `text` with its special tokens marked as plain text.

        The beginning of one at the end of the text too: a template may write the next text directly behind.
        """
        for special in self._specials:
            text = text.replace(special.token.content, special.quoted(len(special.token.content)))
        ends = (text[-length:] for length in range(max(map(len, self._contents.values())), 0, -1))
        begun = next((end for end in ends if end in self._beginnings), "")
        return text[: -len(begun)] + self._beginnings[begun].quoted(len(begun)) if begun else text

    @cached_property
    def places(self) -> TemplatePlaces:
        """What the chat template has places for."""
        from sinkprune.runtime.text.template_places import TemplatePlaces

        return TemplatePlaces(self)

    def _message(self, turn: Turn) -> Message:
        if turn.role == "tool":
            return self.places.result(turn.tool_call_id, "".join(chain.from_iterable(map(text_parts, turn.texts))))
        message: Message = {"role": turn.role, "content": self.content(turn.texts)}
        if turn.tool_calls:
            message["tool_calls"] = self.places.calls(turn.tool_calls)
        elif not message["content"]:
            # Templates may read the first part of an answer, also of an empty one.
            message["content"] = [{"type": "text", "text": ""}]
        return message

    def content(self, texts: Sequence[Text]) -> list[dict[str, str]]:
        """Return a turn's content: an image between each two of `texts`, whose order the template may change."""
        content: list[dict[str, str]] = []
        for number, text in enumerate(texts):
            content += [{"type": "image"}] if number else []
            content += [{"type": "text", "text": self.quoted(part)} for part in text_parts(text)]
        return content

    def render(self, messages: list[Message], functions: list[dict[str, Any]] | None = None) -> str:
        """Return what the template writes, with stand-ins; texts of users and `functions` are quoted."""
        rendered = self.with_stand_ins(self._template.render(messages, self._tokens.bos, self._tokens.eos, functions))
        return self._typed.sub(lambda found: self._contents[int(found[1])][: int(found[2])], rendered)


def _with_written_marks(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that decodes the marks of tool calls to text, even if they are special tokens."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.content in CALL_MARKS for token in added):
        return tokenizer
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] &= token["content"] not in CALL_MARKS
    return Tokenizer.from_str(json.dumps(content))


def _specials(tokenizer: Tokenizer, image_token: int, nonce: int) -> list[_Special]:
    """Return the special tokens, longest first, so that no token is taken for a part of another."""
    added = [
        (identity, token)
        for identity, token in tokenizer.get_added_tokens_decoder().items()
        if token.special or identity == image_token
    ]
    if image_token not in dict(added):
        raise BundleError(f"the bundle's tokenizer has no image token {image_token}. Export the checkpoint again.")
    return [
        _Special(identity, token, f"\ue000{nonce}+{identity}\ue001", f"\ue000{nonce}-{identity}-")
        for identity, token in sorted(added, key=lambda item: -len(item[1].content))
    ]
