"""Responses of `/v1/chat/completions`: one object, or chunks of a stream (server-sent events)."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sinkprune.contract.precision import Array
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.observer import Observer

FINISH = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "length"}
"""OpenAI's finish reason for each of ours."""


class TokenLogprobs(Observer):
    """Collects the log probability of each token, and of the likeliest alternatives."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        """List `top` alternatives of each token."""
        self._tokenizer, self._top = tokenizer, top
        self.tokens: list[dict[str, Any]] = []

    def chose(self, token: int, logits: Array) -> None:
        """Add a token. The logits are the model's own, before temperature and constraints."""
        logits = logits.astype(np.float64)
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argsort(-logprobs, kind="stable")[: self._top]
        top = [self._entry(int(one), logprobs) for one in best]
        self.tokens.append({**self._entry(token, logprobs), "top_logprobs": top})

    def _entry(self, token: int, logprobs: Array) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": float(logprobs[token]), "bytes": [*text.encode()]}


@dataclass
class Completion:
    """The response to one request, as JSON objects."""

    model: str
    queued_ms: float = 0.0
    """The time between the request's arrival and its start."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer, logprobs: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the response with the whole answer."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": FINISH[answer.finish]}
        return {
            **self._head("chat.completion"),
            "choices": [{**choice, "logprobs": _listed(logprobs)}],
            "usage": usage(answer),
            "sinkprune": self.details(answer),
        }

    def chunk(
        self, text: str, logprobs: Sequence[dict[str, Any]] | None = None, *, first: bool = False
    ) -> dict[str, Any]:
        """Return a chunk with a piece of text."""
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        choice = {"index": 0, "delta": delta, "logprobs": _listed(logprobs), "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def last_chunk(self, answer: Answer) -> dict[str, Any]:
        """Return the chunk that ends the answer."""
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": FINISH[answer.finish]}
        return {
            **self._head("chat.completion.chunk"),
            "choices": [choice],
            "sinkprune": self.details(answer),
        }

    def usage_chunk(self, answer: Answer) -> dict[str, Any]:
        """Return the chunk with `usage`, which `stream_options.include_usage` asks for."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(answer)}

    def details(self, answer: Answer) -> dict[str, Any]:
        """Return what was done: budget, tokens of each layer, milliseconds, and what came from memory."""
        return {
            "budget": answer.budget,
            "method": answer.method,
            "finish": answer.finish,
            "visual_tokens": answer.visual_tokens,
            "tokens_per_layer": answer.tokens_per_layer,
            "ms": answer.ms,
            "queued_ms": self.queued_ms,
            "reused_towers": answer.reused_towers,
            "reused_rows": answer.reused_rows,
            "confidence": answer.confidence,
            "choices": answer.choices,
            "tried": [asdict(step) for step in answer.tried],
            "deadline": None if answer.deadline is None else asdict(answer.deadline),
        }

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
