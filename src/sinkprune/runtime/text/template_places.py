"""What a chat template has places for besides one question: system messages, earlier turns, and calls of tools."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sinkprune.contract.errors import BundleError, PromptError, ToolsError
from sinkprune.runtime.text.answer_tokens import BEGIN, END

if TYPE_CHECKING:
    from sinkprune.runtime.text.prompt import Message, PromptEncoder, Turn
    from sinkprune.runtime.text.tools import ToolCall, Tools

NAME_BEFORE, ARGUMENTS_BEFORE, CALL_AFTER = '\n{"name": "', '", "arguments": ', "}\n" + END
"""The texts of a call before the function's name, before its arguments, and after these."""


def call_text(name: str, arguments: str) -> str:
    """Return a call as a model writes it."""
    return BEGIN + NAME_BEFORE + name + ARGUMENTS_BEFORE + arguments + CALL_AFTER


class TemplatePlaces:
    """Messages that a chat template may have no place for. Trials with random texts find that out."""

    def __init__(self, encoder: PromptEncoder) -> None:
        """Try the template of `encoder`."""
        self._encoder = encoder
        self._question: Message = {"role": "user", "content": encoder.content(("", "?"))}

    def check(self, turns: Sequence[Turn], tools: Tools | None) -> None:
        """Raise `ToolsError` for tools and calls, and `PromptError` for several turns, without a place."""
        if (tools or any(turn.tool_calls or turn.role == "tool" for turn in turns)) and not self._writes_calls:
            raise ToolsError(
                f"the model's chat template has no tools, or writes calls in another form than "
                f"{call_text('NAME', '{}')!r}. Leave out tools and calls, or use a model such as Qwen3-VL."
            )
        if len(turns) > 1 and not self._takes_turns:
            raise PromptError(
                "the model answers one question: its chat template has no place for earlier turns. Leave out the "
                "history, or put what matters of it into the question."
            )

    def system_message(self, parts: Sequence[str]) -> Message:
        """Return the system message of these text parts, in parts or as a str; raises `PromptError`."""
        probe = str(secrets.randbits(64))
        for in_parts in (True, False):
            # A template that takes no parts writes them as Python does, in quotes.
            before, found, _ = self._tried([self._system([probe], in_parts), self._question]).partition(probe)
            if found and not before.endswith(("'", '"')):
                return self._system(parts, in_parts)
        raise PromptError(
            "the checkpoint's chat template has no place for a system message. Leave out the system message, and put "
            "its text before the question."
        )

    def calls(self, given: Sequence[ToolCall]) -> Any:
        """Return the calls of an answer, as templates take them."""
        return self.quoted_json([_call(call.id, call.name, call.arguments) for call in given])

    def result(self, call_id: str | None, text: str) -> Message:
        """Return the message with the result of a call."""
        message: Message = self.quoted_json({"role": "tool", "tool_call_id": call_id, "content": text})
        return message

    def quoted_json(self, value: Any) -> Any:
        """Return JSON with the special tokens in all its texts marked as plain text."""
        if isinstance(value, dict):
            return {self._encoder.quoted(name): self.quoted_json(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self.quoted_json(part) for part in value]
        return self._encoder.quoted(value) if isinstance(value, str) else value

    @cached_property
    def keeps_order(self) -> bool:
        """Whether the template writes the text before an image in front of it. LLaVA's writes images first."""
        probe = str(secrets.randbits(64))
        rendered = self._encoder.render([{"role": "user", "content": self._encoder.content((probe, ""))}])
        return probe in rendered.partition(self._encoder.image)[0]

    @cached_property
    def _takes_turns(self) -> bool:
        """Whether the template writes a question after an earlier one and its answer."""
        answer, follow_up = (self._encoder.content((text,)) for text in "!?")
        later: list[Message] = [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
        return bool(self._tried([self._question, *later]))

    @cached_property
    def _writes_calls(self) -> bool:
        """Whether the template lists tools, and writes calls and their results, in the form that answers have."""
        probe = str(secrets.randbits(64))
        function = {"name": f"f{probe}", "description": f"d{probe}"}
        messages = [
            self._question,
            {"role": "assistant", "content": [], "tool_calls": [_call("0", f"f{probe}", {"x": 1})]},
            self.result("0", f"r{probe}"),
        ]
        rendered = self._tried(messages, [{"type": "function", "function": function}])
        written = self._encoder.with_stand_ins(call_text(f"f{probe}", '{"x": 1}'))
        return all(text in rendered for text in (f"d{probe}", written, f"r{probe}"))

    def _system(self, parts: Sequence[str], in_parts: bool) -> Message:
        content = self._encoder.content((tuple(parts),))
        return {"role": "system", "content": content if in_parts else "".join(part["text"] for part in content)}

    def _tried(self, messages: list[Message], functions: list[dict[str, Any]] | None = None) -> str:
        """Return what the template writes, and "" where it fails."""
        try:
            return self._encoder.render(messages, functions)
        except BundleError:
            return ""


def _call(id: str, name: str, arguments: Mapping[str, Any]) -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {**arguments}}}
