"""Chat templates: Jinja programs of checkpoints, rendered in Jinja's sandbox to the text of transformers.

The sandbox keeps templates from running code and from reading files. It bounds neither their time nor their memory.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.untrusted import decoded_text

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
        variables: dict[str, Any] = {
            "messages": messages,
            "add_generation_prompt": True,
            "bos_token": bos,
            "eos_token": eos,
            **({} if tools is None else {"tools": tools}),
        }
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
