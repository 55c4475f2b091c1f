"""Responses of `/v1/chat/completions`: one object, or chunks of a stream (server-sent events). Tools have calls."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from sinkprune.contract.precision import Array
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.media.picture_warnings import notes_on, unseen_notes
from sinkprune.runtime.overlay import token_map
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.text.answer_tokens import BEGIN, StopStrings, TokenBytes
from sinkprune.runtime.text.template_places import ARGUMENTS_BEFORE, CALL_AFTER, NAME_BEFORE


class AnswerPart(NamedTuple):
    """A part of an answer: content, the start of a call, or a part of its arguments."""

    text: str
    """Content, or JSON of a call's arguments; empty at the start of a call."""
    call: int | None = None
    """The number of the call, from 0; None for content."""
    name: str = ""
    """The function's name at the start of its call."""


_CONTENT, _HEAD, _NAME = range(3)
_UNTIL = ((BEGIN, f"\n{BEGIN}"), (NAME_BEFORE,), (ARGUMENTS_BEFORE,), (CALL_AFTER,))
"""The texts that end each part: content, the head of a call, its name, and its arguments."""


class ToolAnswerReader:
    """Takes the text of an answer apart. The result does not depend on how the text is cut into pieces.

    `Tools.grammar` describes the text. A line end before a call is no content, because templates write one there.
    Arguments of a call that was cut off may be incomplete.
    """

    def __init__(self) -> None:
        self.calls = 0
        """The number of calls that have a name."""
        self._kind, self._until, self._name = _CONTENT, StopStrings(_UNTIL[_CONTENT]), ""

    def add(self, piece: str) -> list[AnswerPart]:
        """Return what `piece` adds to the answer: nothing while a text between the parts is incomplete."""
        parts: list[AnswerPart] = []
        # StopStrings drops what follows a string in the same piece.
        for character in piece:
            text = self._until.add(character)
            if self._kind == _NAME:
                self._name += text
            elif text and self._kind != _HEAD:
                call = None if self._kind == _CONTENT else self.calls - 1
                if parts and parts[-1].call == call and not parts[-1].name:
                    text = parts.pop().text + text
                parts.append(AnswerPart(text, call))
            if self._until.found:
                if self._kind == _NAME:
                    parts.append(AnswerPart("", self.calls, self._name))
                    self.calls, self._name = self.calls + 1, ""
                self._kind = (self._kind + 1) % len(_UNTIL)
                self._until = StopStrings(_UNTIL[self._kind])
        return parts

    def end(self) -> list[AnswerPart]:
        """Return the content that was held back. No text follows, and no content follows a call."""
        text = self._until.end()
        return [AnswerPart(text)] if text and self._kind == _CONTENT and not self.calls else []


def _part_delta(part: AnswerPart) -> dict[str, Any]:
    if part.call is None:
        return {"content": part.text}
    if part.name:
        return {"tool_calls": [{"index": part.call, **_call(part.name)}]}
    return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}


def _message_fields(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """Return the fields of a message with the `parts` of an answer."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.name:
            calls.append(_call(part.name))
        elif part.call is not None:
            calls[part.call]["function"]["arguments"] += part.text
    content = "".join(part.text for part in parts if part.call is None)
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


def _call(name: str) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": ""}}


class FileNotes(Observer):
    """Collects sentences about the files of a request's pictures."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def seen(self, pictures: Sequence[TowerInput]) -> None:
        """Add sentences about pictures whose files have 16 bits, or more than one frame."""
        # A request may be prepared again.
        self._notes += [note for note in notes_on([one.file for one in pictures]) if note not in self._notes]


class TokenLogprobs(FileNotes):
    """Also collects the log probability of each token, and of the likeliest alternatives."""

    def __init__(self, notes: list[str], tokenizer: Tokenizer, top: int) -> None:
        super().__init__(notes)
        self._tokenizer, self._bytes, self._top = tokenizer, TokenBytes(tokenizer), top
        self.tokens: list[dict[str, Any]] = []

    def chose(self, token: int, logits: Array) -> None:
        """Add a token. The logits are the model's own, before temperature and constraints."""
        logits = logits.astype(np.float64)
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argsort(-logprobs, kind="stable")[: self._top]
        top = [self._entry(int(one), logprobs) for one in best]
        self.tokens.append({**self._entry(token, logprobs), "top_logprobs": top})
        self._bytes.add(token)

    def _entry(self, token: int, logprobs: Array) -> dict[str, Any]:
        written = self._bytes.peek(token)
        # Special tokens have a name, and write no text.
        text = written.decode(errors="replace") or self._tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": float(logprobs[token]), "bytes": [*written]}


_OF_ANSWER = (
    *("budget", "method", "finish", "visual_tokens", "seen_share", "seen_size", "seen_frames", "tokens_per_layer"),
    *("ms", "confidence", "choices", "deadline"),
)
"""The keys of `Answer.as_json` that `sinkprune` has. OpenAI's fields have the others."""


@dataclass
class Completion:
    """The response to one request, as JSON objects."""

    model: str
    kept_tokens: bool = False
    """Whether `sinkprune` has what became of each visual token."""
    notes: list[str] = field(default_factory=list)
    """Sentences about the request and its pictures, without those about the bundle's limits."""
    reader: ToolAnswerReader | None = None
    """Takes the answer apart if it may call tools."""
    read_ms: float = 0.0
    """The time in which the body arrived and was read, and its pictures decoded."""
    queued_ms: float = 0.0
    """The time in which the request waited for others."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer, logprobs: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the response with the whole answer."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        if self.reader is not None:
            message |= _message_fields([*self.reader.add(answer.text), *self.reader.end()])
        choice = {"index": 0, "message": message, "finish_reason": self._finish(answer)}
        return {
            **self._head("chat.completion"),
            "choices": [{**choice, "logprobs": _listed(logprobs)}],
            "usage": usage(answer),
            "sinkprune": self.details(answer),
        }

    def chunks(
        self, text: str, logprobs: Sequence[dict[str, Any]] | None = None, *, first: bool = False
    ) -> list[dict[str, Any]]:
        """Return the chunks for a piece of the answer's text; none if it adds nothing."""
        deltas: list[dict[str, Any]] = [{"content": text}] if text else []
        if self.reader is not None:
            deltas = [_part_delta(part) for part in self.reader.add(text)]
        if not deltas and (first or logprobs):
            deltas = [{"content": "" if self.reader is None else None} if first else {}]
        if first:
            deltas[0] = {"role": "assistant", "content": None, **deltas[0]}
        listed = [_listed(logprobs), *[None] * len(deltas)]
        return [self._chunk(delta, tokens) for delta, tokens in zip(deltas, listed, strict=False)]

    def last_chunk(self, answer: Answer) -> dict[str, Any]:
        """Return the chunk that ends the answer."""
        delta: dict[str, Any] = {}
        for part in [] if self.reader is None else self.reader.end():
            delta |= _part_delta(part)
        return {**self._chunk(delta, None, self._finish(answer)), "sinkprune": self.details(answer)}

    def usage_chunk(self, answer: Answer) -> dict[str, Any]:
        """Return the chunk with `usage`, which `stream_options.include_usage` asks for."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(answer)}

    def details(self, answer: Answer) -> dict[str, Any]:
        """Return what was done: budget, tokens of each layer, milliseconds, and what came from memory."""
        shared = answer.as_json()
        maps = [token_map(answer.method, kept).as_json() for kept in answer.images] if self.kept_tokens else None
        return {
            **{name: shared[name] for name in _OF_ANSWER},
            "notes": [*self.notes, *(note for kept in answer.images for note in unseen_notes(kept.layout))],
            "read_ms": self.read_ms,
            "queued_ms": self.queued_ms,
            "reused_towers": answer.reused_towers,
            "reused_rows": answer.reused_rows,
            **({} if maps is None else {"kept_tokens": maps}),
        }

    def _finish(self, answer: Answer) -> str:
        """Return OpenAI's finish reason."""
        if answer.finish != "stop":
            return "length"
        return "tool_calls" if self.reader is not None and self.reader.calls else "stop"

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(answer: Answer) -> dict[str, Any]:
    """Return the token counts: visual tokens count as the LLM received them, after the sanitizer."""
    visual = answer.tokens_per_layer[0]
    prompt, new = answer.prompt_tokens + visual, len(answer.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {
            "cached_tokens": answer.reused_rows,
            "text_tokens": answer.prompt_tokens,
            "image_tokens": visual,
        },
    }


def event(data: dict[str, Any] | str) -> bytes:
    """Return a server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _listed(logprobs: Sequence[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if logprobs is None else {"content": [*logprobs], "refusal": None}
